"""The documentation: its links lead somewhere, what it names exists, and what can be checked of what it says is so."""

import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main
from quire_cli.main import app
from quire_engine import EngineConfig
from quire_engine.config.engine_config import setting_names
from quire_engine.errors import CheckpointError
from quire_engine.models.registry import ARCHITECTURES
from quire_engine.models.served import read_checkpoint
from quire_monitoring.definitions import make_metrics
from support.serving import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{page.name}: there is no {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target} has no such heading"


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_every_setting_has_a_row() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    table = text[text.index("| setting |") : text.index("An unknown name")]
    rows = {name for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}
    assert set(setting_names()) - {"disable_log_stats"} <= rows  # that is vLLM's, and in the row of `metrics`
    assert rows <= {*setting_names(), "revision"}


def test_settings_that_the_operators_page_names_exist() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`\"(\w+)\":", text))
    first = re.findall(r"^\| `([a-z_]+)` [^|]*\| [^|]*\|$", text, re.MULTILINE)
    assert first
    assert {*named, *first} - {"slo_class"} <= set(setting_names())


# -- what pages name exists ------------------------------------------------------------------------------------------


def code_of(page: Path) -> list[str]:
    """Each line of the code blocks, and each piece of code within the text."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line.partition(" #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()] + inline


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    for piece in code_of(page) if page.name != "CHANGELOG.md" else ():
        for name in re.findall(r"(?<![\w./:-])[\w-][\w./-]*\.(?:py|yml|yaml|sh|cpp|toml|svg|inc)\b", piece):
            written = name.startswith(("build/", "keys"))
            assert written or any(f"/{file}".endswith(f"/{name}") for file in files), f"{page.name}: no file {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_that_a_page_names_exist(page: Path) -> None:
    for piece in code_of(page):
        for command, rest in re.findall(r"(?:^|[\s/$])quire ((?:bench |keys |model )?[a-z][\w-]*)(?=\s|$)(.*)", piece):
            if command.split()[0] not in COMMANDS and "/quire " not in f"/{piece.strip()}":
                continue  # prose of a diagram
            assert command in COMMANDS, f"{page.name}: quire {command}"
            own = re.split(r"\s--(?:\s|$)|\bquire ", rest)[0]
            unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", own)) - COMMANDS[command] - {"--help"}
            assert not unknown, f"{page.name}: quire {command} has no {unknown}"


def commands_of(group: Any, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    for name, command in group.commands.items():
        yield f"{prefix}{name}", {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{prefix}{name} ")


COMMANDS = dict(commands_of(typer.main.get_command(app)))
SOURCES = [
    path
    for path in ROOT.rglob("*")
    if path.is_file() and not {".venv", ".git", "build", "__pycache__"} & {*path.relative_to(ROOT).parts}
]
PRODUCT = "\n".join(
    path.read_text()
    for path in SOURCES
    if path.relative_to(ROOT).parts[0] not in ("tests", "docs")
    and path.suffix in (".py", ".inc", ".cpp", ".h", ".yml", ".yaml")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    names = {metric.name for metric in make_metrics(num_ranks=1, expert_shape=(1, 1), expert_metrics=True)}
    packages = {folder.name for folder in ROOT.glob("*/quire_*")}
    for piece in code_of(page):
        for name in re.findall(r"\b(?:quire_|vllm:)\w+[a-z]\b(?![*(]|…)", piece):
            name = re.sub(r"(?<=seconds)_(bucket|sum|count)$", "", name)
            own = name.startswith("quire_openai_") and name.removeprefix("quire_openai_key") in PRODUCT
            assert name in names | packages or own or name in PRODUCT, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_that_a_page_names_are_read(page: Path) -> None:
    tests = "\n".join(
        path.read_text() for path in SOURCES if path.parts[len(ROOT.parts)] == "tests" and path.suffix == ".py"
    )
    for name in set(re.findall(r"\bQUIRE_[A-Z_]+[A-Z]\b", page.read_text())):
        assert f'"{name}"' in PRODUCT or name in tests or name in (ROOT / "Makefile").read_text(), name


# -- what pages say is so ----------------------------------------------------------------------------------------------


def test_defaults_of_settings_are_those_of_the_page() -> None:
    config = EngineConfig.from_settings({"model": "/model"})
    groups = [getattr(config, group) for group in ("model", "cache", "scheduler", "parallel", "frontend")]
    text = (ROOT / "docs" / "settings.md").read_text()
    num_checked = 0
    for names, default in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", text, re.MULTILINE):
        said = [part.strip(' `"') for part in re.sub(r"\(.*?\)", "", default).split(",")]
        found = re.findall(r"`(\w+)`", names)
        for name, value in zip(found, said if len(said) == len(found) else [""] * len(found), strict=True):
            group = next((group for group in groups if hasattr(group, name)), None)
            if group is None or not re.fullmatch(r"none|true|false|[\d.]+( [MG]iB)?|[a-z]+", value):
                continue
            actual = getattr(group, name)
            if not (actual is None or isinstance(actual, bool | str | int | float)):
                continue
            unit = {"MiB": 1 << 20, "GiB": 1 << 30}.get(value[-3:], 1)
            shown = str(actual).lower() if actual is None or isinstance(actual, bool | str) else f"{actual / unit:g}"
            if actual is None and value not in ("none", "auto", "false"):
                continue  # what it is then depends on the checkpoint, the device or another setting
            assert shown == value.split()[0].lower() or (actual is None and value == "none"), name
            num_checked += 1
    assert num_checked > 30


def test_limits_of_the_gateway_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "openai.md").read_text()
    rows = re.findall(r"^\| ((?:`--max-[\w-]+`(?:, )?)+) \| ([^|]*) \|", text, re.MULTILINE)
    said = {
        name: int(number) * {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]
        for names, defaults in rows
        for name, (number, unit) in zip(
            re.findall(r"--[\w-]+", names), re.findall(r"(\d+) ?([KM]iB|)", defaults), strict=True
        )
    }
    group: Any = typer.main.get_command(app)
    options = group.commands["openai"].params
    assert said == {option.opts[0]: option.default for option in options if option.opts[0].startswith("--max-")}


def test_the_readme_counts_the_families_and_names_the_machines() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"[{len(ARCHITECTURES)} families]" in readme
    (glibc,) = re.findall(
        r"manylinux_2_(\d+)_x86_64", metadata.distribution("nvidia-pytriton").read_text("WHEEL") or ""
    )
    assert f"on Linux on x86-64 with glibc 2.{glibc} or newer" in readme
    least, first_too_new = sorted(map(int, re.findall(r"3\.(\d+)", metadata.metadata("quire")["Requires-Python"])))
    versions = [f"3.{minor}" for minor in range(least, first_too_new)]
    assert f"Python {', '.join(versions[:-1])} or {versions[-1]}" in readme


def test_the_readmes_tree_has_every_folder_of_the_engine() -> None:
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]  # type: ignore[index]
    engine = {path.parent.name for path in (ROOT / "engine" / "quire_engine").glob("*/__init__.py")}
    assert engine <= set(re.findall(r"(\w+)/", tree))
    for folder in re.findall(r"^([a-z_]+)/", tree, re.MULTILINE):
        assert (ROOT / folder).is_dir()


def test_the_readmes_ready_line_is_the_one_of_quire_serve() -> None:
    group: Any = typer.main.get_command(app)
    parameters = group.commands["serve"].make_context("serve", []).params
    ports = {"health": 8003, "openai": 9000, "dashboard": 8501}
    line = re.search(r"`quire: ready (.*?)`", (ROOT / "README.md").read_text())[1]  # type: ignore[index]
    for word in line.split():
        service, _, address = word.partition("=")
        port = parameters[f"{service}_port"] or ports[service]
        assert address == f"127.0.0.1:{port}"
        assert parameters[f"{service}_port"] or f"Default: {port}" in PRODUCT or f"default: {port}" in PRODUCT


@pytest.mark.parametrize(
    "settings", [{"enable_lora": True}, {"task": "embed"}, {"runner": "pooling"}, {"quantization": "awq"}]
)
def test_settings_that_ask_for_what_is_not_offered_are_rejected_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        EngineConfig.from_settings({"model": "/model", **settings})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, "BertModel"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}, "multi-modal"),
        ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, "recurrent"),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "recurrent"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_checkpoints_that_are_not_offered_are_rejected_by_name(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**llama, **config}))
    with pytest.raises(CheckpointError, match=named):
        read_checkpoint(tmp_path)


def test_a_malformed_gguf_file_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_checkpoint(path)


def test_no_error_and_no_page_installs_quire_from_an_index_that_does_not_have_it() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    assert re.findall(r"pip install ['\"]?quire\b", pages + PRODUCT.replace("`pip install 'quire[…]'` finds", "")) == []
