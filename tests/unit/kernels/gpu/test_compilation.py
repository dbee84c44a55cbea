"""Every kernel in the Triton language compiles for Hopper, which takes no GPU."""

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from quire_kernels import cpu
from support.oracle import stored

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "tests" / "support" / "triton_compile.py"
SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on Hopper (CUDA C++ Programming Guide, compute capability 9.0)."""

NUM_DECODE_VARIANTS = 9
"""That the script's calls of `attention` have; its decodes of any number and length have that of the first."""


def kernel_names() -> set[str]:
    """Of the functions that are launched, in all files."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "kernels" / "quire_kernels" / "gpu").glob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {function.name for function in functions if function.name.endswith("_kernel")}


def compile_all(cache: Path) -> dict[str, Any]:
    """Name of each kernel → its shared memory at most, how many variants it has, whether one has `wgmma`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        cpu.KERNELS_VARIABLE: cpu.INTERPRETER,  # the form in the Triton language, for CPU tensors
    }
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    variants: dict[str, list[dict[str, Any]]] = {}
    for line in run.stdout.splitlines():
        variants.setdefault(json.loads(line)["kernel"], []).append(json.loads(line))
    return {
        name: [max(one["shared"] for one in of), len({one["hash"] for one in of}), any(one["wgmma"] for one in of)]
        for name, of in variants.items()
    }


def code(path: Path) -> bytes:
    """A file without comments and docstrings, which compile to nothing."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not is_text(part)] or [ast.Pass()]
    return ast.unparse(tree).encode()


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_what_the_kernels_are_made_of_is_their_code(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    found = set()
    for text in ('def f(x):\n    """Old."""\n    return x + 1', "# New.\ndef f(x):\n    return (x + 1)  # more"):
        file.write_text(text)
        found.add(code(file))
    file.write_text("def f(x):\n    return x + 2")
    assert len(found) == 1
    assert code(file) not in found


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    made_of = hashlib.sha256(triton.__version__.encode() + code(SCRIPT))
    for path in [SCRIPT.with_name("recurrences.py"), *sorted((ROOT / "kernels" / "quire_kernels").rglob("*.py"))]:
        made_of.update(code(path))
    found = stored("kernels-for-hopper", made_of.hexdigest(), lambda: {"kernels": compile_all(tmp_path)})["kernels"]
    assert found.keys() == kernel_names()
    assert {name for name, (shared, _, _) in found.items() if shared > SHARED_MEMORY} == set()
    assert found["_decode_kernel"][1] == NUM_DECODE_VARIANTS, "a step of another size waits for the compiler"
    # The instructions without which large products are slow there.
    assert {"_prefill_kernel", "_linear_kernel", "_experts_kernel"} <= {
        name for name, (_, _, has_wgmma) in found.items() if has_wgmma
    }
