"""Ops of recurrent layers in the Triton language, against plain torch, and to the bits the same in any steps."""

import pytest
import torch
from quire_kernels import gated_rms_norm
from support.emulated_instructions import selected
from support.full import FULL
from support.recurrences import OPS, Step, make_op, whole

LENGTH = 9
ALL = [(name, torch.bfloat16) for name in OPS]
LONGEST = ("delta of wide heads", "space of wide heads")
"""In the interpreter; its steps are those of the narrow heads."""
OTHERS = [(name, dtype) for name in ("conv of 4", "delta", "space") for dtype in (torch.float32, torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), ALL + OTHERS)
def test_kernels_compute_what_torch_does(
    name: str, device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    steps = [
        Step(10, 5, 2, 3, [(2, 6), (5, 3)], num_replayed=2),
        Step(0, 6, -1, 5, [(1, 1), (4, 7), (6, 5)]),
        Step(7, 1, 4, 4, [(1, 4)]),
        Step(10, 3, 2, 8, [(1, 8)], num_replayed=1),
        Step(9, 4, 9, 9, [(4, 9)], num_replayed=3),
    ]
    num_rows = sum(step.num_rows for step in steps)
    with selected("torch"):
        op = make_op(name)
        caches = op.caches()
        expected = op(op.tokens(num_rows, 1, dtype), caches, steps)
    op = make_op(name, device)
    own = op.caches(device)
    out = op(op.tokens(num_rows, 1, dtype, device), own, steps)
    torch.testing.assert_close(out.cpu(), expected, **{key: 4 * value for key, value in tolerance.items()})
    torch.testing.assert_close(own[0].cpu(), caches[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(own[1].cpu(), caches[1]), "a ring has the inputs themselves"


@pytest.mark.parametrize("name", [name for name in OPS if FULL or torch.cuda.is_available() or name not in LONGEST])
def test_any_steps_have_the_bits_of_the_whole(name: str, device: torch.device) -> None:
    """Chunks, and drafts that are rejected or computed again; beside another sequence."""
    dtype = torch.bfloat16
    op = make_op(name, device)
    tokens, wrong = op.tokens(LENGTH, 2, dtype, device), op.tokens(LENGTH, 3, dtype, device)
    expected, expected_caches = whole(op, tokens)
    caches, source, known, replayed = op.caches(device), -1, 0, 0
    outs = torch.empty_like(expected)
    for new, drafts, accepted in ((3, 4, 0), (1, 3, 2), (1, 1, 1), (1, 0, 0)):
        first, sure = known + replayed, known + replayed + new
        end, target = sure + accepted, (source + 1) % 2
        rows = torch.cat((wrong[:2], tokens[first:end], wrong[end : sure + drafts]))
        steps = [
            Step(0, 2, -1, 9, [(2, 9)]),
            Step(first, new + drafts, source, target, [(replayed + new, target)], num_replayed=replayed),
        ]
        outs[first:end] = op(rows, caches, steps)[2 : 2 + end - first]
        known, replayed, source = sure, accepted, target
    assert known + replayed == LENGTH
    assert torch.equal(outs, expected)
    assert torch.equal(caches[0][source], expected_caches[0][0])


@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize(("groups", "group_size", "shares_weight"), [(3, 37, True), (2, 128, False)])
def test_gated_rms_norm(
    groups: int, group_size: int, shares_weight: bool, gates_first: bool,
    device: torch.device, dtype: torch.dtype, tolerance: dict[str, float],
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    size = groups * group_size
    hidden, gate = torch.randn(6, 2 * size + 3, generator=generator).to(device, dtype)[:, 1:-2].split(size, 1)
    weight = torch.randn(group_size if shares_weight else size, generator=generator).to(device)
    out = gated_rms_norm(hidden, gate, weight, 1e-5, group_size, gates_first)
    x, silu = hidden.double(), torch.nn.functional.silu(gate.double())
    x = (x * silu if gates_first else x).unflatten(1, (groups, group_size))
    x = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight.repeat(size // len(weight))
    torch.testing.assert_close(out.double(), x if gates_first else x * silu, **tolerance)
