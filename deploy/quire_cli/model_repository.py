"""A Triton model repository: its models, and writing the two files that make a checkpoint one of them."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_engine.errors import CheckpointError

from quire_cli.errors import CommandError, UsageError

if TYPE_CHECKING:
    from quire_engine.adapters.checkpoint import AdapterCheckpoint
    from quire_engine.config import EngineConfig
    from quire_engine.models import ServedCheckpoint

LOCAL = Path("model_repository")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CONFIG = """\
backend: "quire"
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""


def demo_repository() -> Path | None:
    """The checkout's repository; None if quire was installed without it."""
    folder = Path(__file__).resolve().parents[2] / "model_repository"
    return folder if folder.is_dir() else None


def find_repository(path: Path | None) -> Path:
    """The repository at a path; unset: `./model_repository` if it exists, else the checkout's, which has tinypy.

    Raises:
        CommandError: there is none, or it holds no model.
    """
    found = path or (LOCAL if LOCAL.is_dir() else demo_repository())
    if found is None:
        raise CommandError("there is no ./model_repository, nor that of a checkout; give --model or --model-repository")
    if found.is_file():
        raise CommandError(f"{found} is a file; --model-repository is a folder of models")
    if not found.is_dir():
        raise CommandError(f"there is no folder {found}; make one with: quire model add PATH")
    repository = found.resolve()
    if (repository / "config.json").is_file():
        raise CommandError(f"{repository} is a checkpoint, not a model repository; give it with --model")
    if path is not None and not models_of(repository):
        raise CommandError(f"{repository} holds no model; add one with: quire model add PATH")
    return repository


def models_of(repository: Path) -> list[Path]:
    """The folders of a repository's models, by name."""
    try:
        return sorted(filter(_is_model, repository.iterdir()))
    except PermissionError as error:
        raise CommandError(f"the model repository {repository} cannot be read: {error.strerror}") from None


def _is_model(folder: Path) -> bool:
    try:
        entries = list(folder.iterdir()) if folder.is_dir() else []
    except PermissionError:  # such as lost+found of a volume
        return False
    return any(one.name == "config.pbtxt" or one.name.isdecimal() for one in entries)


def newest_version(model: Path) -> Path | None:
    """The version folder with the highest number that has a model.json; None if there is none."""
    versions = [one for one in model.iterdir() if one.name.isdecimal() and (one / "model.json").is_file()]
    return max(versions, key=lambda one: int(one.name), default=None)


def describe_model(model: Path) -> dict[str, str | None]:
    """A model's name, its newest version, and the checkpoint in that one's model.json; None where there is none, as of
    another backend's models, or where it cannot be read."""
    version = newest_version(model)
    checkpoint = None
    if version is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
            named = json.loads((version / "model.json").read_text(encoding="utf-8")).get("model")
            checkpoint = str(version / named if (version / named).exists() else named)
    return {"name": model.name, "version": None if version is None else version.name, "checkpoint": checkpoint}


def model_name(path: Path, name: str | None) -> str:
    """The name of a model: the one given, else that of its folder or its file.

    Raises:
        UsageError: it is not a valid model name.
    """
    chosen = name if name is not None else path.resolve().name.removesuffix(".gguf")
    if not _NAME.fullmatch(chosen):
        mend = "use letters, digits, '_', '-' and '.'" if name is not None else "choose one with --name"
        raise UsageError(f"{chosen!r} cannot be a model's name; {mend}")
    return chosen


def parse_settings(items: Sequence[str]) -> dict[str, Any]:
    """Settings given as `key=value`: the value is parsed as JSON if it is JSON, else it is a string.

    Raises:
        UsageError: an item is not of that form, or a key comes twice or is `model`.
    """
    settings: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UsageError(f"{item!r} is no setting; write key=value, for example max_model_len=4096")
        if key == "model":
            raise UsageError("the setting model is the PATH; leave model= out")
        if key in settings:
            raise UsageError(f"the setting {key} is given twice; give it once")
        settings[key] = _value(value)
    return settings


def check_model(path: Path, settings: Mapping[str, Any]) -> tuple["EngineConfig", "ServedCheckpoint"]:
    """Check a checkpoint and the settings that it is to be served with, without loading it.

    Raises:
        CommandError: the checkpoint is incomplete, or cannot be served.
        UsageError: a setting is not known or has a bad value.
    """
    from quire_engine.config import EngineConfig
    from quire_engine.frontend.default_sampling_params import read_default_sampling_params
    from quire_engine.models import check_checkpoint

    try:
        config = EngineConfig.from_settings({"model": str(path), **settings}, base_dir=Path.cwd())
    except ValueError as error:
        raise UsageError(str(error)) from None
    model, frontend = config.model, config.frontend
    try:
        checkpoint = check_checkpoint(
            Path(model.model), Path(model.tokenizer_path), model.load_format, config.scheduler.draft_checkpoint,
            model.model_impl,
        )  # fmt: skip
        read_default_sampling_params(model.model, frontend.generation_config, frontend.override_generation_config)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    return config, checkpoint


def read_adapters(
    config: "EngineConfig", checkpoint: "ServedCheckpoint"
) -> Iterator[tuple[str, "AdapterCheckpoint | CheckpointError"]]:
    """Each adapter of the setting `lora_modules`, or what is wrong with it."""
    if not config.lora.lora_modules:
        return
    from quire_engine.adapters.adaptable import adaptable_modules
    from quire_engine.adapters.checkpoint import AdapterCheckpoint
    from quire_engine.models.checkpoints.config import CheckpointConfig

    if not isinstance(checkpoint, CheckpointConfig):
        raise CheckpointError(f"{checkpoint.architecture} runs with transformers' own code, which takes no adapters")
    modules = adaptable_modules(checkpoint, config)

    def read(folder: str) -> AdapterCheckpoint | CheckpointError:
        try:
            return AdapterCheckpoint.read(Path(folder), modules, config.lora.max_lora_rank)
        except CheckpointError as error:
            return error

    for name, folder in config.lora.lora_modules.items():
        yield name, read(folder)


def offered_tasks(config: "EngineConfig", checkpoint: "ServedCheckpoint") -> list[str]:
    """What a checkpoint is for: `generate`, `embed` and others.

    Raises:
        CheckpointError: what it says of pooling is malformed.
    """
    from quire_engine.tasks.reading import read_pooling_info

    info = read_pooling_info(Path(config.model.model), checkpoint)
    return [*(["generate"] if info.can_generate else []), *info.tasks]


def write_model(
    repository: Path, path: Path, name: str | None = None, settings: Mapping[str, Any] | None = None, *,
    force: bool = False,
) -> Path:  # fmt: skip
    """Check a checkpoint and its settings, and write `<name>/config.pbtxt` and `<name>/1/model.json`.

    Args:
        repository: created if it does not exist.
        path: the checkpoint's folder, or a GGUF file.
        name: of the model; unset: the folder's or the file's.
        settings: the engine's, as in `model.json`. Relative paths in them are relative to the working directory.
        force: overwrite the two files of a model that is already there.

    Returns:
        The model's folder in the repository.

    Raises:
        CommandError: the checkpoint or an adapter cannot be served, or the model is already there.
        UsageError: a setting is not known or has a bad value.
    """
    from quire_engine.config import SECRETS

    folder = repository / model_name(path, name)
    config, checkpoint = check_model(path, settings or {})
    for adapter, read in read_adapters(config, checkpoint):
        if isinstance(read, CheckpointError):
            raise CommandError(f"the adapter {adapter}: {read}")
    drafts = config.scheduler.draft_checkpoint
    if (folder / "config.pbtxt").exists() and not force:
        raise CommandError(f"{folder} already exists; choose another --name, or overwrite it with --force")
    # The file's paths would be relative to the version folder; the settings' were relative to where we are.
    written = {**(settings or {}), "model": config.model.model}
    written.pop("revision", None)  # the folder is of that one
    if config.frontend.generation_config not in ("auto", "vllm"):
        written["generation_config"] = config.frontend.generation_config
    if config.model.tokenizer is not None:
        written["tokenizer"] = config.model.tokenizer
    if config.lora.lora_modules:
        written["lora_modules"] = config.lora.lora_modules
    if drafts is not None and drafts[1] is not None:
        written["speculative_config"] = {**written["speculative_config"], "model": drafts[1]}
    file = folder / "1" / "model.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if any(name in written for name in SECRETS):
            file.touch(mode=0o600)
            file.chmod(0o600)
        file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        (folder / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}") from None
    return folder


def _value(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)  # NaN and Infinity are no JSON
    except ValueError:
        return text
