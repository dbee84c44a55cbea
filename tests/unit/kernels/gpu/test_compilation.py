"""Every kernel in the Triton language compiles for Hopper, which takes no GPU."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quire_kernels import cpu

ROOT = Path(__file__).parents[4]
SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on Hopper (CUDA C++ Programming Guide, compute capability 9.0)."""

NUM_DECODE_VARIANTS = 6
"""That the script's calls of `attention` have; its decodes of any number and length have that of the first."""


def kernel_names() -> set[str]:
    """Of the functions that are launched, in all files."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "kernels" / "quire_kernels" / "gpu").glob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {function.name for function in functions if function.name.endswith("_kernel")}


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        cpu.KERNELS_VARIABLE: cpu.INTERPRETER,  # the form in the Triton language, for CPU tensors
    }
    script = ROOT / "tests" / "support" / "triton_compile.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == kernel_names()
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY] == []
    decodes = {kernel["hash"] for kernel in kernels if kernel["kernel"] == "_decode_kernel"}
    assert len(decodes) == NUM_DECODE_VARIANTS, "a step of another size waits for the compiler"
    # The instructions without which large products are slow there.
    assert {"_prefill_kernel", "_linear_kernel", "_experts_kernel"} <= {
        kernel["kernel"] for kernel in kernels if kernel["wgmma"]
    }
