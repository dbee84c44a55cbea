"""The documentation: its links lead somewhere, what it names exists, and what can be checked of what it says is so."""

import json
import math
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from quire_cli.main import app
from quire_engine import EngineConfig
from quire_engine.config.engine_config import setting_names
from quire_engine.device.placement import BFLOAT16_COMPUTE_CAPABILITY, FP8_COMPUTE_CAPABILITY
from quire_engine.errors import CheckpointError
from quire_engine.kv_cache import KVCacheGroups, block_bytes
from quire_engine.models import CheckpointConfig, weight_cache
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import Packable, Weight
from quire_engine.models.linear import linear_methods
from quire_engine.models.loader import META, build, load_model
from quire_engine.models.packed_values import Encoder
from quire_engine.models.registry import ARCHITECTURES
from quire_engine.models.served import read_checkpoint
from quire_engine.worker.cache_allocator import CacheLayout
from quire_kernels.cpu import INSTRUCTION_SETS, library
from quire_kernels.kv_cache import scale_bytes
from quire_monitoring.definitions import MetricsConfig, make_metrics
from support.serving import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

PAGES.append(ROOT / "SECURITY.md")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


RESULTS = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
"""Dated, so what they name need not exist any more."""


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda page: page.name)
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


def test_the_page_of_figures_names_every_file_of_results() -> None:
    named = set(re.findall(r"\]\(benchmarks/([\w-]+\.md)\)", (ROOT / "docs" / "benchmarks.md").read_text()))
    assert named == {page.name for page in RESULTS}


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
        for command, rest in re.findall(
            r"(?:^|[\s/$])quire ((?:bench |keys |model |lora )?[a-z][\w-]*)(?=\s|$)(.*)", piece
        ):
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
    for entry in ROOT.iterdir()
    if entry.name not in (".venv", ".git", "build", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis")
    for path in (entry.rglob("*") if entry.is_dir() else [entry])
    if path.is_file() and "__pycache__" not in path.parts
]
PRODUCT = "\n".join(
    path.read_text()
    for path in SOURCES
    if path.relative_to(ROOT).parts[0] not in ("tests", "docs")
    and path.suffix in (".py", ".inc", ".cpp", ".h", ".yml", ".yaml")
)
TESTS = "\n".join(
    path.read_text() for path in SOURCES if path.relative_to(ROOT).parts[0] == "tests" and path.suffix == ".py"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    names = {
        metric.name
        for metric in make_metrics(
            MetricsConfig(expert_shape=(1, 1), expert_metrics=True, max_loras=1, takes_images=True)
        )
    }
    packages = {folder.name for folder in ROOT.glob("*/quire_*")}
    for piece in code_of(page):
        for name in re.findall(r"\b(?:quire_|vllm:)\w+[a-z]\b(?![*(]|…)", piece):
            name = re.sub(r"(?<=seconds)_(bucket|sum|count)$", "", name)
            own = name.startswith("quire_openai_") and name.removeprefix("quire_openai_key") in PRODUCT
            assert name in names | packages or own or name in PRODUCT, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_that_a_page_names_are_read(page: Path) -> None:
    for name in set(re.findall(r"\bQUIRE_[A-Z_]+[A-Z]\b", page.read_text())):
        assert f'"{name}"' in PRODUCT or name in TESTS or name in (ROOT / "Makefile").read_text(), name


# -- what pages say is so ----------------------------------------------------------------------------------------------


def test_defaults_of_settings_are_those_of_the_page() -> None:
    config = EngineConfig.from_settings({"model": "/model"})
    groups = [getattr(config, group) for group in ("model", "cache", "scheduler", "parallel", "lora", "frontend")]
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


def test_the_changelog_the_security_policy_and_the_chart_have_the_packages_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    released = re.findall(r"^## (?!Unreleased)(.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", released[0])
    assert f"today {version.rpartition('.')[0]}." in (ROOT / "SECURITY.md").read_text()
    chart = (ROOT / "deploy" / "helm" / "quire" / "Chart.yaml").read_text()
    assert f'appVersion: "{version}"' in chart


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
    "settings", [{"enable_lora_bias": True}, {"task": "transcription"}, {"runner": "draft"}, {"quantization": "awq"}]
)
def test_settings_that_ask_for_what_is_not_offered_are_rejected_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        EngineConfig.from_settings({"model": "/model", **settings})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma"}, "multi-modal"),
        ({"architectures": ["ZambaForCausalLM"], "model_type": "zamba"}, "recurrent"),
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "recurrent"),
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


def test_the_page_of_versions_is_true() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    requirements = {one.partition(";")[0].strip() for one in metadata.requires("quire") or []}
    least, most = re.search(r"^\| torch \| ([\d.]+) to ([\d.]+) \|", text, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert f"torch<={most},>={least}" in requirements
    least, below = re.search(r"^\| transformers \| ([\d.]+) or newer, below (\d+) \|", text, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert f"transformers<{below},>={least}" in requirements
    server = re.search(r"`nvidia-pytriton` ([\d.]+)", text)[1]  # type: ignore[index]
    assert f"nvidia-pytriton=={server}" in requirements
    container = re.search(r"NVIDIA's container ([\d.]+)", text)[1]  # type: ignore[index]
    assert f"tritonserver:{container}-py3" in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    least = re.search(r"^\| Kubernetes \| ([\d.]+) or newer", text, re.MULTILINE)[1]  # type: ignore[index]
    assert f'kubeVersion: ">={least}.0-0"' in (ROOT / "deploy" / "helm" / "quire" / "Chart.yaml").read_text()
    kernels = re.findall(r"^\| `(\w+)` \| [^|]*\| [^|]*\|$", text, re.MULTILINE)
    assert kernels == [*INSTRUCTION_SETS, "torch"]
    for capability in (BFLOAT16_COMPUTE_CAPABILITY, FP8_COMPUTE_CAPABILITY):
        assert f"compute capability {'.'.join(map(str, capability))}" in text


# -- sizes -------------------------------------------------------------------------------------------------------------

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 131072, "head_dim": 128}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "Gemma 3 1B": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
        "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    "Llama 3.2 1B": {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "Llama 3.1 8B": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "Qwen3 30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Llama 3.3 70B": {
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
"""The fields of `config.json` of the models on docs/sizing.md."""
FORMATS = {None: (16, 16), "int8": (8, 8), "int4": (4.5, 8)}
"""By the setting `quantization`, the bits per weight of layers and of the head on docs/sizing.md."""


def sizes_of(values: dict[str, Any], folder: Path) -> tuple[CheckpointConfig, Decoder]:
    """The model of a `config.json`, without memory for its weights."""
    (folder / "config.json").write_text(json.dumps(values))
    config = CheckpointConfig.from_folder(folder)
    methods = linear_methods(config.weight_format, None)
    return config, build(lambda: Decoder(config, 1), torch.bfloat16, META, methods)


def weight_bytes(model: Decoder, layer_bits: float, head_bits: float) -> float:
    """By the rule of docs/sizing.md."""
    bits = 0.0
    for module in model.modules():
        if isinstance(module, Packable):
            is_head = module is model.head
            bits += module.num_parameters * (
                head_bits if is_head else layer_bits if module.activation_bits == 8 else 16
            )
        elif isinstance(module, Weight):
            bits += module.weight.numel() * 16
    return bits / 8


@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_the_page_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    config, model = sizes_of(MODELS[name], tmp_path)
    groups = KVCacheGroups.of(config.windows, config.max_position_embeddings)
    layout = CacheLayout.of(model.state_specs, model.layer_numbers, groups)
    request_bytes = groups.max_blocks(8192, 16, 2048) * block_bytes(layout.tensor_specs, 16, 2)
    billions = [model.num_parameters(), *(weight_bytes(model, *bits) for bits in FORMATS.values())]
    token_bytes = [
        block_bytes(model.state_specs, 1, 2),
        block_bytes(model.state_specs, 1, 1, scale_size=scale_bytes(torch.int8)),
    ]
    found = [float(cell.split()[0].replace(",", "")) for cell in row.split(" | ")]
    assert found[4:6] == token_bytes
    assert [*found[:4], found[6]] == pytest.approx([number / 1e9 for number in (*billions, request_bytes)], rel=4e-3)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("quantization", FORMATS)
def test_packed_weights_have_the_bits_of_the_page(quantization: str | None, is_tied: bool, tmp_path: Path) -> None:
    if library() is None and quantization == "int4":
        pytest.skip("plain torch dequantises them")
    values = {**MODELS["Llama 3.2 1B"], "num_hidden_layers": 1, "vocab_size": 4096, "tie_word_embeddings": is_tied}
    config, model = sizes_of(values, tmp_path)
    loaded = load_model(tmp_path, config, torch.bfloat16, 64, quantization=quantization, load_format="dummy")
    encoder = Encoder()
    for _, module in weight_cache._modules(loaded):
        encoder.encode_all(weight_cache._state(module))
    assert encoder.size == pytest.approx(weight_bytes(model, *FORMATS[quantization]), rel=0.01)


def test_examples_of_the_page_follow_from_its_table() -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    free_on_gpu, cpu_cache = 0.9 * 80 - 16.1, (24 - 5.50) / 2 * 0.9
    requests = math.floor(free_on_gpu * 1e9 / 131072 / 8192)
    assert f"At most {free_on_gpu:.1f} GB remain" in text
    assert f"{free_on_gpu * 1e6 / 131072:.0f},000 tokens, or {requests} requests of 8,192" in text
    assert f"{cpu_cache:.3g} GB, or {cpu_cache * 1e9 / 131072:,.0f}"[:-3] in text
    assert f"and {cpu_cache * 1e6 / 67584:.0f},000 with" in text
