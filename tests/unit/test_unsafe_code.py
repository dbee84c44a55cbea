"""Nothing that a checkpoint or a message brings is run."""

import ast

import pytest
from support.source import all_modules, imports_of

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"torch.load", "torch.serialization.load", "torch.hub.load"}
UNSAFE_NAMES = {"recv_pyobj", "send_pyobj", "allow_pickle", "trust_remote_code"}
UNSAFE_ATTRIBUTES = UNSAFE_NAMES | {call.rpartition(".")[2] for call in UNSAFE_CALLS}


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
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_ATTRIBUTES:
            base, _, rest = ast.unparse(node).partition(".")
            dotted = f"{aliases.get(base, base)}.{rest}"
            if dotted in UNSAFE_CALLS or node.attr in UNSAFE_NAMES:
                found.append(f"{node.lineno}: uses {dotted}")
        elif isinstance(node, ast.keyword) and node.arg in UNSAFE_NAMES:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append(f"{node.value.lineno}: sets {node.arg}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            loads = node.func.attr == "from_pretrained" or (
                node.func.attr.startswith("from_")
                and ast.unparse(node.func.value).rpartition(".")[2].startswith("Auto")
            )
            # Without it, transformers asks on stdin whether to run the checkpoint's code, and takes "y" from a pipe.
            if loads and not any(word.arg == "trust_remote_code" for word in node.keywords):
                found.append(f"{node.lineno}: {node.func.attr} without trust_remote_code=False")
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


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "f(trust_remote_code=True)",
        "AutoTokenizer.from_pretrained('x', local_files_only=True)",
        "transformers.AutoModel.from_config(config)",
        "loader.from_pretrained('x')",
        "loader.from_pretrained('x', trust_remote_code=True)",
        "f(**{'trust_remote_code': True})",
        "def f(trust_remote_code): pass",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "socket.recv_pyobj()",
    ],
)
def test_unsafe_use_is_found_however_it_is_spelled(source: str) -> None:
    assert unsafe_uses(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.load_library('x')",
        "f(trust_remote_code=False)",
        "json.load(f)",
        "AutoTokenizer.from_pretrained('x', trust_remote_code=False)",
    ],
)
def test_safe_use_is_let_through(source: str) -> None:
    assert unsafe_uses(source) == []
