"""Which form of an op computes."""

import subprocess
import sys

import pytest
import torch
from quire_kernels import cpu
from quire_kernels.cpu import uses_triton

RUN_ALL_OPS = """
import sys, torch, quire_kernels as ops
x, ids, ones = torch.ones(2, 32), torch.arange(2), torch.ones(2)
cache = torch.zeros(2, 1, 1, 16, 32)
ops.add_rms_norm(ops.rms_norm(x, x[0], 1e-5), x.clone(), x[0], 1e-5)
ops.linear(ops.embedding(ids, ops.silu_and_mul(x)), ops.pack_linear(torch.ones(8, 16)))
query = ops.rope_and_cache(x[:, None], x[:, None], x[:, None], ids, x, ids, cache[0], cache[1])
starts = torch.tensor([0, 2])
ops.plan_attention(ids[None, :1], starts, starts[1:], 1, cache[0])
ops.paged_attention(query, cache[0], cache[1], ids[None, :1], starts, starts[1:], 1.0)
ops.apply_token_bitmask(x, ids, torch.zeros(2, 1, dtype=torch.int32))
ops.store_rows(x, ids, x.clone())
ops.argmax(x), ops.sample(x, ones, ones, ids + 1, ones, ids, ids)
print("triton" in sys.modules)
"""


def test_ops_on_the_cpu_never_import_triton() -> None:
    run = subprocess.run([sys.executable, "-c", RUN_ALL_OPS], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_the_interpreter_is_used_when_asked_for(device: torch.device) -> None:
    assert uses_triton(torch.ones(1, device=device))
    if device.type == "cpu":
        assert cpu.library() is None
        assert cpu.status().interprets_triton


def test_else_the_cpu_computes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.KERNELS_VARIABLE, "torch")
    cpu.status.cache_clear()
    assert not uses_triton(torch.ones(1))
    monkeypatch.undo()
    cpu.status.cache_clear()
    assert not uses_triton(torch.ones(1))
