"""Sampling on every instruction set (see conftest.py): against plain torch and the textbook."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quire_kernels import apply_token_bitmask, argmax, cpu, probabilities, sample
from quire_kernels.sampling import _gumbel_noise_torch, _sample_torch
from support.sampling import MASKS, columns, distribution, extreme_rows, logits_of, p_value, without_noise

Once = Callable[..., Any]

INFINITY = float("inf")
VOCAB_SIZES = [1, 7, 64, 515, 4096, 32003]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_is_that_of_torch(vocab_size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    logits = logits_of(20, vocab_size, 1.0, dtype)
    logits[1] = 0
    logits[2] = -INFINITY
    logits[3] = INFINITY
    logits[4, vocab_size // 2] = INFINITY
    logits[5] = -INFINITY
    logits[5, -1] = -1e30
    logits[6, vocab_size // 2 :] = float("nan")
    logits[7, -1] = -float("nan")
    logits[8] = logits[8].clamp(max=0.5)  # ties
    logits[9, 0], logits[9, 1:] = -0.0, 0.0
    wide = torch.cat((logits, torch.full_like(logits, 1e9)), dim=1)[:, :vocab_size]
    assert argmax(wide).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_are_those_of_torch(vocab_size: int, mask: dict[str, float], cpu_kernels: str, once: Once) -> None:
    """Of all rows: logarithms that differ in their last bit decided none of them, nor in 138,240 rows tried once."""
    if cpu_kernels == "torch":
        pytest.skip("plain torch would be compared with itself")
    rows = 48
    generator = torch.Generator().manual_seed(1)
    for scale, dtype in ((0.1, torch.float32), (1.0, torch.float32), (4.0, torch.float32), (2.0, torch.bfloat16)):
        logits = logits_of(rows, vocab_size, scale, dtype)
        temperature = torch.rand(rows, generator=generator) * 1.5 + 0.1
        temperature[::7] = 0
        arguments = columns(rows, temperature=temperature, seeds=torch.arange(rows) * 977 - 9, **mask)
        expected = once((scale, dtype), lambda given=arguments, x=logits: _sample_torch(x, **given).tolist())
        assert sample(logits, **arguments).tolist() == expected


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_tokens_are_drawn_from_the_distribution(mask: dict[str, float], cpu_kernels: str) -> None:
    draws, vocab_size = 20_000, 130
    row = logits_of(1, vocab_size, 1.5)
    for temperature in (1.0, 0.6):
        arguments = columns(draws, temperature=temperature, seeds=torch.arange(draws), **mask)
        counts = torch.bincount(sample(row.expand(draws, vocab_size), **arguments), minlength=vocab_size)
        assert p_value(counts, distribution(row[0] / temperature, **mask)) > 1e-4


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_probabilities_are_those_of_the_textbook(
    vocab_size: int, mask: dict[str, float], cpu_kernels: str, once: Once
) -> None:
    """But for one token at the end of a nucleus, where rounding decides whether the sum has reached p."""
    rows = 5
    for scale in (0.1, 1.0, 4.0):
        logits = logits_of(rows, vocab_size, scale)
        before, temperature = logits.clone(), torch.tensor([0.0, 0.3, 0.8, 1.0, 1.6])
        p = probabilities(logits, **without_noise(rows, temperature=temperature, **mask))
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), vocab_size).double()
        given = logits / temperature.unsqueeze(-1)
        wanted = once(scale, lambda given=given: [distribution(row, **mask) for row in given[1:]])
        assert (p - torch.stack((one_hot[0], *wanted))).abs().sum(-1).max() < 2e-4
        assert torch.equal(logits, before)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_probabilities_of_extreme_rows(mask: dict[str, float], cpu_kernels: str) -> None:
    logits = extreme_rows()
    for temperature in (1.0, 1e-30, 1e30):
        p = probabilities(logits, **without_noise(len(logits), temperature=temperature, **mask))
        torch.testing.assert_close(p.sum(-1), torch.ones(len(logits)))
        assert p[[0, 1, 3], [0, 700, 123]].tolist() == [1, 1, 1]
        assert p[7, 9] == 1 or temperature == 1e30
        assert p[8, 5] == 1, "NaN counts as the largest"
        assert not p[4, 500:].any()
        torch.testing.assert_close(p[2], torch.full((1000,), 1e-3))


def test_probabilities_of_no_rows(cpu_kernels: str) -> None:
    assert probabilities(torch.zeros(0, 7), **without_noise(0)).shape == (0, 7)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_extreme_rows(mask: dict[str, float], cpu_kernels: str) -> None:
    logits = extreme_rows()
    for temperature in (1.0, 1e-30, 1e30):
        arguments = columns(9, temperature=temperature, **mask)
        tokens = sample(logits, **arguments).tolist()
        assert all(0 <= token < logits.shape[1] for token in tokens)
        assert (tokens[1], tokens[3], tokens[7]) == (700, 123, 9) or temperature == 1e30
        assert tokens[4] < 500
        assert tokens == _sample_torch(logits, **arguments).tolist()


def test_top_k_and_top_p_keep_ties(cpu_kernels: str) -> None:
    draws = 500
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0]).expand(draws, 5)
    for mask in ({"top_k": 2}, {"top_p": 0.6}):
        tokens = sample(logits, **columns(draws, seeds=torch.arange(draws), **mask))
        assert set(tokens.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(threads: int, cpu_kernels: str) -> None:
    rows, vocab_size = 40, 5003
    logits = logits_of(rows, vocab_size, 2.0)
    generator = torch.Generator().manual_seed(0)
    arguments = columns(rows, seeds=torch.arange(rows), positions=torch.arange(rows) + 2**31)
    arguments["temperature"] = torch.rand(rows, generator=generator).mul_(2).where(torch.arange(rows) % 5 > 0, 0)
    arguments["top_k"] = torch.randint(1, 300, (rows,), generator=generator).where(torch.arange(rows) % 2 > 0, 10**6)
    arguments["top_p"] = torch.rand(rows, generator=generator).where(torch.arange(rows) % 3 > 0, 1.0)
    before = cpu.get_num_threads()
    try:
        cpu.set_num_threads(threads)
        together = sample(logits, **arguments).tolist()
    finally:
        cpu.set_num_threads(before)
    picked = [slice(row, row + 1) for row in range(rows)]
    alone = [int(sample(logits[row], **{name: c[row] for name, c in arguments.items()})) for row in picked]
    assert together == alone
    order = torch.randperm(rows, generator=generator)
    mixed = sample(logits[order], **{name: column[order] for name, column in arguments.items()})
    assert mixed.tolist() == [together[row] for row in order.tolist()]


def level(rows: int, vocab_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits to which the noise adds up to nearly the same for every token, so that the last bits of it decide."""
    seeds, positions = torch.arange(rows) * 2**33 - 1, torch.arange(rows) * 977 + 2**32 - rows * 977
    return -_gumbel_noise_torch(seeds, positions, vocab_size), columns(rows, seeds=seeds, positions=positions)


@pytest.mark.parametrize(("rows", "vocab_size"), [(3, 1), (500, 63), (40, 10_001)])
def test_noise_is_that_of_torch_but_for_the_last_bits(rows: int, vocab_size: int, cpu_kernels: str) -> None:
    logits, arguments = level(rows, vocab_size)
    ahead = torch.arange(rows) * 61 % vocab_size
    logits[torch.arange(rows), ahead] += 1e-5
    assert sample(logits, **arguments).tolist() == ahead.tolist()


def test_all_instruction_sets_compute_the_same_noise() -> None:
    """Bit by bit, so that a request can go on with another machine's processor."""
    status = cpu.status()
    if status.handle is None:
        pytest.skip(status.reason)
    logits, arguments = level(300, 4096)
    tokens = {}
    try:
        for name in cpu.INSTRUCTION_SETS:
            if status.handle.quire_select(name.encode()):
                tokens[name] = sample(logits, **arguments).tolist()
    finally:
        status.handle.quire_select(str(status.instruction_set).encode())
    best, *others = tokens
    for name in others:
        assert tokens[name] == tokens[best], name


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 515, 4096])
def test_token_bitmask(vocab_size: int, cpu_kernels: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    words = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    logits = logits_of(4, vocab_size, 1.0)
    expected = logits.clone()
    for i, row in enumerate([3, 1]):
        for token in range(vocab_size):
            if not (int(words[i, token // 32]) >> (token % 32)) & 1:
                expected[row, token] = -INFINITY
    apply_token_bitmask(logits, torch.tensor([3, 1]), words)
    assert torch.equal(logits, expected)
