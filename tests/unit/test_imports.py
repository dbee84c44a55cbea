"""The arrows of the packages: who may import whom, and what nobody may import.

Read from the source, so that imports inside functions count and nothing has to be importable here. An import under
`if TYPE_CHECKING:` counts as an arrow like any other, but not against "never imports torch": it is never executed.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROOTS = {
    "quire_kernels": ROOT / "kernels",
    "quire_engine": ROOT / "engine",
    "quire_monitoring": ROOT / "monitoring",
    "quire_backend": ROOT / "backend",
    "quire_cli": ROOT / "deploy",
    "quire_dashboard": ROOT / "dashboard",
}

CHAIN = ["quire_kernels", "quire_engine", "quire_monitoring", "quire_backend", "quire_cli"]
"""Each may import itself and those before it. `quire_dashboard` stands aside."""

LEAVES = {
    "child_process",
    "config",
    "errors",
    "memory",
    "messages",
    "process_state",
    "request",
    "sampling_params",
    "semaphore",
    "slo",
    "snapshot",
    "stats",
    "structured_outputs_params",
    "vllm_settings",
}

_TEXT = {"input_processor", "output_processor", "detokenizer", "tokenizer"}

ARROWS: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "kv_cache": set(),
    "scheduler": {"kv_cache"},
    "distributed": set(),
    "transfer": set(),
    "models": {"distributed", "transfer"},
    "sampling": {"transfer"},
    "spec_decode": set(),
    "worker": {"models", "distributed", "sampling", "spec_decode", "transfer"},
    "executor": {"worker", "distributed"},
    "structured_output": {"tokenizer"},
    "core": {"scheduler", "executor", "structured_output"},
    "detokenizer": set(),
    "chat_template": set(),
    "tokenizer": set(),
    "input_processor": {"chat_template"},
    "parallel_sampling": {"input_processor"},
    "introspection": set(),
    "outputs": set(),
    "request_state": {"detokenizer", "input_processor", "introspection", "outputs", "parallel_sampling"},
    "output_processor": {"request_state"},
    "beam_search": {"detokenizer", "outputs"},
    "llm": {"core", "beam_search"} | _TEXT,
    "async_llm": {"core", "beam_search"} | _TEXT,
    "testing": {"scheduler"},
    "__init__": {"llm", "async_llm", "beam_search"},
}
"""Within the engine: part → the parts it may import, besides itself, the leaves, and whatever those reach."""

BESIDES = {
    ("worker", "quire_engine.kv_cache.sizing"),
    ("worker", "quire_engine.executor.message_queue"),
    ("tokenizer", "quire_engine.models.files"),
    ("request", "quire_engine.structured_output.grammar"),
}
"""Single modules that a part may import besides: arithmetic, plain JSON, a protocol, bytes. They import only leaves."""

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

TENSOR_FREE = {"scheduler", "kv_cache", "outputs", "testing", "__init__"} | LEAVES


@dataclass(frozen=True)
class Import:
    """One imported module, or name of a module."""

    name: str
    """Absolute and dotted; `from a import b` gives `a.b`."""
    line: int
    type_checking: bool


def imports_of(source: str, module: str, is_package: bool) -> list[Import]:
    """All imports of a module, at whatever depth, relative ones resolved; `import_module("…")` counts as well."""
    found: list[Import] = []

    def visit(node: ast.AST, type_checking: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, type_checking) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".")
                anchor = anchor[: len(anchor) - node.level + is_package]
                base = ".".join([*anchor, base] if base else anchor)
            found.extend(Import(f"{base}.{alias.name}", node.lineno, type_checking) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append(Import(node.args[0].value, node.lineno, type_checking))
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.body:
                visit(statement, True)
            for statement in node.orelse:
                visit(statement, type_checking)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, type_checking)

    visit(ast.parse(source), False)
    return found


def modules_of(package: str) -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of a package."""
    for path in sorted((ROOTS[package] / package).rglob("*.py")):
        parts = list(path.relative_to(ROOTS[package]).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def all_modules() -> list[tuple[str, str, Path]]:
    return [(package, module, path) for package in ROOTS for module, path in modules_of(package)]


def imports_in_file(module: str, path: Path) -> list[Import]:
    return imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


def engine_part(module: str) -> str:
    """`quire_engine.kv_cache.manager` → `kv_cache`; the package itself → `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def engine_part_imported(name: str) -> str:
    """The part that an imported dotted name belongs to: `from quire_engine import llm` is of `llm`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ARROWS else ("__init__" if len(parts) <= 2 else parts[1])


def reachable(part: str) -> set[str]:
    """Every part that may be imported from `part`."""
    seen: set[str] = set()
    ahead = [part]
    while ahead:
        current = ahead.pop()
        if current not in seen:
            seen.add(current)
            ahead.extend(ARROWS[current])
    return seen | LEAVES


def forbidden_package(package: str, imported: str) -> bool:
    """Whether `package` must not import from the top-level package `imported`."""
    if imported not in ROOTS or imported == package:
        return False
    if "quire_dashboard" in (package, imported):
        return True
    return CHAIN.index(imported) > CHAIN.index(package)


def engine_violations(module: str, imports: list[Import]) -> list[str]:
    """The imports of one engine module that go against the arrows within the engine."""
    part = engine_part(module)
    if part not in ARROWS:
        return [f"{module}: its place among the arrows is not known; add {part!r} to ARROWS"]
    allowed = reachable(part) if part not in LEAVES else LEAVES
    return [
        f"{module}:{item.line} imports {item.name}"
        for item in imports
        if item.name.split(".")[0] == "quire_engine"
        and engine_part_imported(item.name) not in allowed
        and not any(part == besides and f"{item.name}.".startswith(f"{name}.") for besides, name in BESIDES)
    ]


# -- the arrows --------------------------------------------------------------------------------------------------------


def test_packages_import_one_way_only() -> None:
    violations = [
        f"{module}:{item.line} imports {item.name}"
        for package, module, path in all_modules()
        for item in imports_in_file(module, path)
        if forbidden_package(package, item.name.split(".")[0])
    ]
    assert violations == []


def test_the_file_that_tritonserver_loads_imports_no_command_line() -> None:
    path = ROOT / "backend" / "quire" / "model.py"
    if not path.exists():
        pytest.skip("backend/quire/model.py is not there")
    imported = {item.name.split(".")[0] for item in imports_in_file("model", path)}
    assert [name for name in imported if forbidden_package("quire_backend", name)] == []


def test_engine_parts_import_one_way_only() -> None:
    violations = [
        violation
        for module, path in modules_of("quire_engine")
        for violation in engine_violations(module, imports_in_file(module, path))
    ]
    assert violations == []


def test_modules_imported_besides_the_arrows_import_only_leaves() -> None:
    for _, name in BESIDES:
        path = ROOTS["quire_engine"] / (name.replace(".", "/") + ".py")
        ours = [item.name for item in imports_in_file(name, path) if item.name.split(".")[0] in (*ROOTS, "torch")]
        assert [imported for imported in ours if imported.split(".")[1] not in LEAVES] == []


def test_engine_knows_no_server_no_exporter_and_no_http() -> None:
    for package in ("quire_engine", "quire_kernels"):
        violations = [
            f"{module}:{item.line} imports {item.name}"
            for module, path in modules_of(package)
            for item in imports_in_file(module, path)
            if item.name.split(".")[0] in ENGINE_KNOWS_NOTHING_OF
        ]
        assert violations == []


def test_bookkeeping_parts_never_import_torch() -> None:
    violations = [
        f"{module}:{item.line} imports {item.name}"
        for module, path in modules_of("quire_engine")
        if engine_part(module) in TENSOR_FREE
        for item in imports_in_file(module, path)
        if item.name.split(".")[0] in ("torch", "quire_kernels") and not item.type_checking
    ]
    assert violations == []


@pytest.mark.parametrize(
    "module",
    [
        "quire_engine",
        "quire_engine.scheduler",
        "quire_engine.messages",
        "quire_engine.models",
        "quire_engine.async_llm",
        "quire_engine.testing",
    ],
)
def test_importing_leaves_torch_alone(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "[]", "")


# -- nothing that runs foreign code ------------------------------------------------------------------------------------

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"torch.load", "torch.serialization.load", "torch.hub.load"}
UNSAFE_NAMES = {"recv_pyobj", "send_pyobj", "allow_pickle", "trust_remote_code"}


def unsafe_uses(source: str) -> list[str]:
    """Where a module unpickles, or lets a checkpoint bring code of its own. `trust_remote_code=False` is welcome."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    found = [
        f"{item.line}: imports {item.name}"
        for item in imports_of(source, "module", False)
        if item.name.split(".")[0] in UNSAFE_MODULES or item.name in UNSAFE_CALLS
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, _, rest = ast.unparse(node).partition(".")
            dotted = f"{aliases.get(base, base)}.{rest}"
            if dotted in UNSAFE_CALLS or node.attr in UNSAFE_NAMES:
                found.append(f"{node.lineno}: uses {dotted}")
        elif isinstance(node, ast.keyword) and node.arg in UNSAFE_NAMES:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append(f"{node.value.lineno}: sets {node.arg}")
        elif isinstance(node, ast.Dict):
            keys = [key for key in node.keys if isinstance(key, ast.Constant) and key.value in UNSAFE_NAMES]
            found.extend(f"{key.lineno}: sets {key.value!r}" for key in keys)
        elif isinstance(node, ast.arg) and node.arg in UNSAFE_NAMES:
            found.append(f"{node.lineno}: takes {node.arg}")
    return found


def test_nothing_is_unpickled_and_no_checkpoint_brings_code() -> None:
    violations = [
        f"{module}:{use}" for _, module, path in all_modules() for use in unsafe_uses(path.read_text(encoding="utf-8"))
    ]
    assert violations == []


# -- __all__ -----------------------------------------------------------------------------------------------------------


def bound_names(tree: ast.Module) -> tuple[set[str], dict[str, str]]:
    """Names that exist once a module was imported, and names → modules imported for type checkers only."""
    bound: set[str] = set()
    for_checkers: dict[str, str] = {}

    def visit(statements: list[ast.stmt]) -> None:
        for node in statements:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                bound.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for child in node.body:
                    if isinstance(child, ast.ImportFrom) and child.module:
                        for_checkers.update({alias.asname or alias.name: child.module for alias in child.names})
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for name in ("body", "orelse", "finalbody"):
                    visit(getattr(node, name, []))
                for handler in getattr(node, "handlers", []):
                    visit(handler.body)
            else:
                targets = [child for child in ast.walk(node) if isinstance(child, ast.Name)]
                bound.update(target.id for target in targets if isinstance(target.ctx, ast.Store))

    visit(tree.body)
    return bound, for_checkers


def exported_names(tree: ast.Module) -> list[str] | None:
    """The names in `__all__`; None without one."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value
            and "__all__" in [ast.unparse(item) for item in targets]
        ):
            names = ast.literal_eval(node.value)
            assert all(isinstance(name, str) for name in names)
            return list(names)
    return None


MODULES_WITH_ALL = [
    (module, path) for _, module, path in all_modules() if "__all__" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize(("module", "path"), MODULES_WITH_ALL, ids=[module for module, _ in MODULES_WITH_ALL])
def test_exported_names_exist(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    exported = exported_names(tree)
    assert exported is not None, f"{module}: __all__ must be a plain list"
    assert len(set(exported)) == len(exported)
    bound, for_checkers = bound_names(tree)
    files = {name: file for _, name, file in all_modules()}
    for name in exported:
        if name in bound:
            continue
        # Imported on first use: the module must have `__getattr__`, and the home that type checkers see must be right.
        assert "__getattr__" in bound, f"{module}.{name} does not exist"
        assert name in for_checkers, f"{module}.{name} does not exist"
        home = for_checkers[name]
        assert home in files, f"{module}.{name}: there is no module {home}"
        bound_there, _ = bound_names(ast.parse(files[home].read_text(encoding="utf-8")))
        assert name in bound_there, f"{home}.{name} does not exist"


def test_names_loaded_on_first_use_come_from_where_type_checkers_look() -> None:
    import quire_engine

    tree = ast.parse((ROOTS["quire_engine"] / "quire_engine" / "__init__.py").read_text(encoding="utf-8"))
    _, for_checkers = bound_names(tree)
    assert for_checkers == quire_engine._HOMES


def test_engine_has_no_attribute_that_it_does_not_name() -> None:
    import quire_engine

    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = quire_engine.LLMM


# -- that these tests could fail ---------------------------------------------------------------------------------------


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
def test_backward_import_is_found_wherever_it_hides(source: str) -> None:
    imports = imports_of(source, "quire_engine.core.x", False)
    assert any(forbidden_package("quire_engine", item.name.split(".")[0]) for item in imports)


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("quire_engine.scheduler.x", "from quire_engine.kv_cache import y", True),
        ("quire_engine.scheduler.x", "from ..kv_cache import y", True),
        ("quire_engine.scheduler.x", "from quire_engine.executor import y", False),
        ("quire_engine.scheduler.x", "from ..executor import y", False),
        ("quire_engine.scheduler.x", "from quire_engine import LLM", False),
        ("quire_engine.kv_cache.x", "from quire_engine.scheduler import y", False),
        ("quire_engine.config", "from quire_engine.errors import y", True),
        ("quire_engine.config", "from quire_engine.kv_cache import y", False),
        ("quire_engine.worker.x", "from quire_engine.models.llama import y", True),
        ("quire_engine.worker.x", "from quire_engine.kv_cache.sizing import y", True),
        ("quire_engine.worker.x", "from quire_engine.kv_cache import KVCacheManager", False),
        ("quire_engine.models.x", "from quire_engine.kv_cache.sizing import y", False),
        ("quire_engine.models.x", "from quire_engine import sampling", False),
        ("quire_engine.llm", "from quire_engine.async_llm import y", False),
        ("quire_engine.llm", "from quire_engine.core.client import y", True),
        ("quire_engine.core.x", "from quire_engine.output_processor import y", False),
        ("quire_engine.brand_new.x", "import os", False),
    ],
)
def test_engine_arrows_are_the_ones_of_the_architecture(module: str, source: str, allowed: bool) -> None:
    assert (engine_violations(module, imports_of(source, module, False)) == []) is allowed


@pytest.mark.parametrize(
    ("package", "imported", "forbidden"),
    [
        ("quire_cli", "quire_kernels", False),
        ("quire_kernels", "quire_engine", True),
        ("quire_engine", "quire_monitoring", True),
        ("quire_monitoring", "quire_backend", True),
        ("quire_dashboard", "quire_engine", True),
        ("quire_cli", "quire_dashboard", True),
        ("quire_engine", "torch", False),
    ],
)
def test_package_arrows_are_the_ones_of_the_architecture(package: str, imported: str, forbidden: bool) -> None:
    assert forbidden_package(package, imported) is forbidden


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "f(trust_remote_code=True)",
        "f(**{'trust_remote_code': True})",
        "def f(trust_remote_code): pass",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "socket.recv_pyobj()",
    ],
)
def test_unsafe_use_is_found_however_it_is_spelled(source: str) -> None:
    assert unsafe_uses(source) != []


@pytest.mark.parametrize(
    "source", ["import torch\ntorch.ops.load_library('x')", "f(trust_remote_code=False)", "json.load(f)"]
)
def test_safe_use_is_let_through(source: str) -> None:
    assert unsafe_uses(source) == []
