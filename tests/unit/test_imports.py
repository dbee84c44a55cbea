"""The arrows: who may import whom, and what nobody may import."""

import graphlib
import subprocess
import sys

import pytest
from support.source import ROOTS, all_modules, imports_in_file, imports_of, modules_of

CHAIN = ["quire_kernels", "quire_engine", "quire_monitoring", "quire_backend", "quire_cli"]
"""Each may import itself and those before it."""

DASHBOARD = "quire_dashboard"
"""The dashboard stands aside: it knows a server by what that says, and `quire_cli` alone uses it."""

LOAD, USERS_OF_LOAD = "quire_load", {"quire_cli", "quire_dashboard"}
"""The load generator stands aside as well, and these use it."""

CLIENT = "quire_client"
USERS_OF_CLIENT = {"quire_gateway", "quire_load", "quire_cli", "quire_dashboard", "quire_monitoring"}
"""The client imports nothing of ours, and these use it. Alerts and boards, in `quire_monitoring`, have its limits."""

GATEWAY, USED_BY_GATEWAY = "quire_gateway", {"quire_client", "quire_engine"}
"""The gateway stands aside as well: it knows the engine's sampling parameters, and `quire_cli` alone uses it."""

ENGINE = {
    # What a user imports.
    "": "llm async_llm config outputs sampling_params pooling lora frontend",
    "llm": "core frontend encoders adapters kv_connector messages outputs config sampling_params pooling lora stats "
    "errors system",
    "async_llm": "replicas frontend encoders adapters kv_connector messages outputs config sampling_params pooling "
    "lora stats errors models slo snapshot system tasks",
    # The frontend, the replicas and the engine core.
    "replicas": "core scheduler kv_cache kv_connector models config messages stats errors snapshot ipc system timeline",
    "frontend": "scheduler encoders models messages outputs sampling_params pooling stats errors slo snapshot system "
    "timeline",
    "core": "executor scheduler spec_decode kv_cache kv_connector adapters structured_output tasks models config "
    "messages lora stats errors snapshot ipc system timeline",
    "spec_decode": "scheduler messages config",
    "structured_output": "scheduler frontend messages structured_outputs_params errors system",
    "scheduler": "adapters kv_cache config messages sampling_params lora slo stats errors snapshot "
    "draft_chances timeline",
    "kv_cache": "messages sampling_params snapshot",
    "kv_connector": "scheduler kv_cache models config messages stats errors ipc system",
    # The workers.
    "executor": "worker distributed models device config messages errors ipc system",
    "worker": "models tasks kv_cache kv_connector adapters sampling distributed device config messages sampling_params "
    "pooling errors ipc system draft_chances",
    "encoders": "models config messages stats errors system",
    "adapters": "models distributed config messages lora stats errors system",
    "tasks": "models pooling errors",
    "models": "kv_cache distributed device errors system",
    "sampling": "device messages sampling_params",
    "distributed": "errors ipc",
    "device": "config errors",
    # The vocabulary.
    "outputs": "messages pooling stats",
    "messages": "config sampling_params pooling lora slo snapshot stats ipc draft_chances timeline",
    "draft_chances": "",
    "config": "slo errors",
    "sampling_params": "structured_outputs_params pooling lora slo errors",
    "pooling": "errors",
    "lora": "",
    "structured_outputs_params": "errors",
    "slo": "errors",
    "ipc": "",
    "system": "",
    "snapshot": "lora timeline",
    "stats": "sampling_params timeline",
    "timeline": "",
    "errors": "",
}
"""Within `quire_engine`: file or folder → those whose names it may say."""

TENSOR_FREE = {
    "scheduler", "spec_decode", "kv_cache", "outputs", "messages", "config", "sampling_params", "pooling", "lora",
    "slo", "snapshot", "stats", "errors", "draft_chances", "timeline",
}  # fmt: skip
"""They never import torch."""

ENGINE_KNOWS_NOTHING_OF = {
    "aiohttp",
    "fastapi",
    "flask",
    "http",
    "httpx",
    "opentelemetry",
    "prometheus_client",
    "requests",
    "starlette",
    "triton_python_backend_utils",
    "tritonclient",
    "urllib",
    "uvicorn",
}


def arrows() -> dict[str, set[str]]:
    """Module → the modules of ours that it imports, in all packages."""
    modules = {module for _, module, _ in all_modules()}
    found: dict[str, set[str]] = {}
    for _, module, path in all_modules():
        found[module] = set()
        for item in imports_in_file(module, path):
            name = item.name
            while name not in modules and name:
                name = name.rpartition(".")[0]
            found[module] |= {name} - {"", module}
    return found


def part(module: str) -> str:
    """`quire_engine.kv_cache.manager` → `kv_cache`."""
    return f"{module}.".split(".")[1]


def test_packages_import_one_way_only() -> None:
    def is_allowed(package: str, imported: str) -> bool:
        if CLIENT in (package, imported):
            return package == imported or package in USERS_OF_CLIENT
        if GATEWAY in (package, imported):
            return package == imported or imported in USED_BY_GATEWAY or package == "quire_cli"
        if LOAD in (package, imported):
            return package == imported or package in USERS_OF_LOAD
        if DASHBOARD in (package, imported):
            return package == imported or package == "quire_cli"
        return imported == package or CHAIN.index(imported) < CHAIN.index(package)

    assert [
        f"{module} imports {imported}"
        for module, all_imported in arrows().items()
        for imported in all_imported
        if not is_allowed(module.split(".")[0], imported.split(".")[0])
    ] == []


def test_the_client_alone_speaks_grpc() -> None:
    assert [
        f"{module}:{item.line} imports {item.name}"
        for package, module, path in all_modules()
        for item in imports_in_file(module, path)
        if package != CLIENT and item.name.split(".")[0] in ("grpc", "tritonclient")
    ] == []


def test_the_file_that_tritonserver_loads_imports_the_backend_alone() -> None:
    imported = {item.name.split(".")[0] for item in imports_in_file("model", ROOTS["quire_backend"] / "quire/model.py")}
    assert imported & ROOTS.keys() == {"quire_backend"}


def violations(of: dict[str, set[str]]) -> list[str]:
    """The imports within the engine that the table does not allow."""
    return [
        f"{module} imports {imported}"
        for module, all_imported in of.items()
        for imported in all_imported
        if module.startswith("quire_engine")
        and imported.startswith("quire_engine.")
        and part(imported) not in (part(module), *ENGINE[part(module)].split())
    ]


def test_parts_of_the_engine_import_as_the_table_says() -> None:
    assert violations(arrows()) == []
    assert violations({"quire_engine.scheduler.x": {"quire_engine.kv_cache", "quire_engine.scheduler.y"}}) == []
    assert violations({"quire_engine.scheduler.x": {"quire_engine.executor.y"}}) != []


def test_the_table_has_no_circle_and_nothing_that_nobody_uses() -> None:
    tuple(graphlib.TopologicalSorter({name: allowed.split() for name, allowed in ENGINE.items()}).static_order())
    used = {
        (part(module), part(imported))
        for module, all_imported in arrows().items()
        for imported in all_imported
        if module.startswith("quire_engine") and imported.startswith("quire_engine")
    }
    assert [
        (name, other) for name, allowed in ENGINE.items() for other in allowed.split() if (name, other) not in used
    ] == []


def test_there_is_no_circle_of_files() -> None:
    tuple(graphlib.TopologicalSorter(arrows()).static_order())


def test_engine_knows_no_server_no_exporter_and_no_http() -> None:
    assert [
        f"{module}:{item.line} imports {item.name}"
        for package in ("quire_kernels", "quire_engine")
        for module, path in modules_of(package)
        for item in imports_in_file(module, path)
        if item.name.split(".")[0] in ENGINE_KNOWS_NOTHING_OF
    ] == []


def test_bookkeeping_never_imports_torch() -> None:
    assert [
        f"{module}:{item.line} imports {item.name}"
        for module, path in modules_of("quire_engine")
        if part(module) in TENSOR_FREE
        for item in imports_in_file(module, path)
        if item.name.split(".")[0] in ("torch", "quire_kernels") and not item.type_checking
    ] == []


@pytest.mark.parametrize(
    "module",
    [
        "quire_engine",
        "quire_engine.scheduler.scheduler",
        "quire_engine.messages",
        "quire_engine.models",
        "quire_engine.async_llm",
    ],
)
def test_importing_leaves_torch_alone(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "[]", "")


@pytest.mark.parametrize(
    "source",
    [
        "import quire_backend.x",
        "def f():\n    from quire_backend import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from quire_backend.x import y",
        "from importlib import import_module\nimport_module('quire_backend.x')",
        "try:\n    import quire_backend\nexcept ImportError:\n    pass",
    ],
)
def test_an_import_is_found_wherever_it_hides(source: str) -> None:
    assert any(item.name.startswith("quire_backend") for item in imports_of(source, "quire_engine.core.x", False))


def test_a_relative_import_is_resolved() -> None:
    (item,) = imports_of("from ..executor import y", "quire_engine.scheduler.x", False)
    assert item.name == "quire_engine.executor.y"
