"""`quire model add`: settings from the command line, and the two files that it writes."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_cli.errors import CommandError, UsageError
from quire_cli.main import run
from quire_cli.model_repository import demo_repository, model_name, models_of, parse_settings, write_model
from support.adapters import make_adapter

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model"


def test_the_served_folder_has_no_programs() -> None:
    """Python would cache one's code beside the versions, and tritonserver warns of a version `__pycache__`."""
    repository = demo_repository()
    assert repository is not None
    assert not [*repository.rglob("*.py")]


def test_values_are_json_else_strings() -> None:
    items = ["a=1", "b=0.5", "c=true", "d=bfloat16", 'e={"x": [1]}', "f=", "g=a=b", "h=null", "i=NaN", 'j="7"']
    assert parse_settings(items) == {
        "a": 1, "b": 0.5, "c": True, "d": "bfloat16", "e": {"x": [1]}, "f": "", "g": "a=b", "h": None, "i": "NaN",
        "j": "7",
    }  # fmt: skip


@pytest.mark.parametrize("items", [["dtype"], ["=1"], ["model=x"], ["a=1", "a=2"]])
def test_what_is_no_setting_is_refused(items: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_settings(items)


def test_name_is_the_folders_unless_given(tmp_path: Path) -> None:
    assert model_name(tmp_path / "Llama-3.2-1B", None) == "Llama-3.2-1B"
    assert model_name(tmp_path / "x", "mine") == "mine"
    for path, name in ((tmp_path / "with space", None), (tmp_path / "x", "../up"), (tmp_path / "x", "")):
        with pytest.raises(UsageError, match="cannot be a model's name"):
            model_name(path, name)


def test_writes_a_model_that_the_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKPOINT.parent)
    folder = write_model(tmp_path, Path("model"), "mine", {"max_model_len": 128, "tokenizer": "model"})
    assert folder == tmp_path / "mine"
    assert 'backend: "quire"' in (folder / "config.pbtxt").read_text()
    # Relative paths on the command line are relative to where it is typed, not to the file that is written.
    settings = json.loads((folder / "1" / "model.json").read_text())
    assert settings == {"model": str(CHECKPOINT), "max_model_len": 128, "tokenizer": str(CHECKPOINT)}


def test_the_path_of_a_model_that_drafts_is_written_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKPOINT.parent)
    drafting = {"model": "model", "num_speculative_tokens": 3}
    folder = write_model(tmp_path, Path("model"), "mine", {"speculative_config": drafting})
    settings = json.loads((folder / "1" / "model.json").read_text())
    assert settings["speculative_config"] == {"model": str(CHECKPOINT), "num_speculative_tokens": 3}
    assert drafting["model"] == "model", "the caller's are left alone"
    folder = write_model(tmp_path, Path("model"), "other", {"speculative_config": {"method": "ngram"}})
    assert json.loads((folder / "1" / "model.json").read_text())["speculative_config"] == {"method": "ngram"}


def test_adapters_are_checked_and_their_paths_are_written_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_adapter(tmp_path / "sql", CHECKPOINT, targets=("q_proj",))
    settings = {"enable_lora": True, "lora_modules": {"sql": "sql"}}
    folder = write_model(tmp_path, CHECKPOINT, "mine", settings)
    written = json.loads((folder / "1" / "model.json").read_text())
    assert written["lora_modules"] == {"sql": str(tmp_path / "sql")}
    (tmp_path / "sql" / "adapter_model.safetensors").unlink()
    with pytest.raises(CommandError, match=r"^the adapter sql: .*adapter_model\.safetensors"):
        write_model(tmp_path, CHECKPOINT, "other", settings)
    assert not (tmp_path / "other").exists()


def test_a_model_that_drafts_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^speculative_config: model: there is no folder .*nowhere"):
        write_model(tmp_path, CHECKPOINT, "mine", {"speculative_config": {"model": "nowhere"}})
    assert not (tmp_path / "mine").exists()


def test_overwrites_only_when_forced(tmp_path: Path) -> None:
    write_model(tmp_path, CHECKPOINT, "mine")
    with pytest.raises(CommandError, match="--force"):
        write_model(tmp_path, CHECKPOINT, "mine", {"seed": 1})
    write_model(tmp_path, CHECKPOINT, "mine", {"seed": 1}, force=True)
    assert json.loads((tmp_path / "mine" / "1" / "model.json").read_text())["seed"] == 1


def test_weights_of_another_shape_are_noticed(tmp_path: Path) -> None:
    """Without loading any of them."""
    folder = tmp_path / "odd"
    folder.mkdir()
    for file in CHECKPOINT.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 1}))
    with pytest.raises(CommandError, match=r"tensor model\.layers\.0\.mlp\.\w+\.weight has shape .* asks for"):
        write_model(tmp_path / "repository", folder, "odd")
    layers = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers + 1}))
    with pytest.raises(CommandError, match=rf"hold no layers\.{layers}\."):
        write_model(tmp_path / "repository", folder, "odd")
    assert not (tmp_path / "repository").exists()


def test_nothing_is_written_for_a_bad_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_model_len"):
        write_model(tmp_path / "repository", CHECKPOINT, "mine", {"max_model_len": -1})
    assert not (tmp_path / "repository").exists()


def test_command_says_how_to_serve_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model", "add", str(CHECKPOINT), "dtype=float32", "--name", "mine", "--model-repository"]
    assert run([*arguments, str(tmp_path)]) == 0
    assert f"quire serve --model-repository {tmp_path}" in capsys.readouterr().out


def test_demo_repository_holds_the_demo_model() -> None:
    repository = demo_repository()
    assert repository is not None
    assert (repository / "tinypy" / "config.pbtxt").is_file()


def test_settings_with_a_token_are_for_their_owner_alone(tmp_path: Path) -> None:
    file = write_model(tmp_path, CHECKPOINT, "mine") / "1" / "model.json"
    file.chmod(0o644)
    write_model(tmp_path, CHECKPOINT, "mine", {"introspection_token": "a token of operators"}, force=True)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_read_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, closed = write_model(tmp_path, CHECKPOINT, "mine"), tmp_path / "lost+found"
    closed.mkdir()
    read = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:  # root may read all
        if folder == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return read(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert models_of(tmp_path) == [model]
    with pytest.raises(CommandError, match=r"lost\+found cannot be read: Permission denied"):
        models_of(closed)


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(path: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(CommandError, match="mine cannot be written: No space left on device"):
        write_model(tmp_path, CHECKPOINT, "mine")
