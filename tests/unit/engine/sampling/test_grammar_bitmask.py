"""apply_grammar_bitmask: exactly the bits that are not set are masked, in exactly the rows that are named."""

import numpy as np
import pytest
import torch
from quire_engine.sampling import Sampler, SamplingMetadata
from quire_engine.sampling.token_constraints import apply_grammar_bitmask


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 515, 4096])
def test_against_a_loop(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    bitmask = rng.integers(-(2**31), 2**31, (2, -(-vocab_size // 32))).astype(np.int32)
    logits = torch.randn(4, vocab_size)
    expected = logits.clone()
    for i, row in enumerate([3, 1]):
        for token in range(vocab_size):
            if not (int(bitmask[i, token // 32]) >> (token % 32)) & 1:
                expected[row, token] = float("-inf")
    apply_grammar_bitmask(logits, [3, 1], bitmask)
    assert torch.equal(logits, expected)


def test_greedy_and_random_rows_obey_and_their_neighbours_do_not_notice() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 100)
    bitmask = np.zeros((2, 4), np.int32)
    bitmask[0, 1] = 1 << 5  # token 37 alone
    bitmask[1, 2] = 0b11  # tokens 64 and 65

    def sample(grammar_bitmask: tuple[list[int], np.ndarray] | None) -> list[int]:
        metadata = SamplingMetadata(
            temperature=torch.tensor([0.0, 1, 0, 1, 0, 1]), top_p=torch.tensor([1.0, 0.5, 1, 1, 1, 0.9]),
            top_k=torch.tensor([100, 3, 100, 100, 100, 100]), min_p=torch.zeros(6), seeds=torch.arange(6),
            positions=torch.arange(6), num_logprobs={}, forbidden=[], all_greedy=False,
            grammar_bitmask=grammar_bitmask,
        )  # fmt: skip
        return Sampler()(logits.clone(), metadata).wait().token_ids

    free, constrained = sample(None), sample(([0, 1], bitmask))
    assert constrained[0] == 37
    assert constrained[1] in (64, 65)
    assert constrained[2:] == free[2:]


def test_they_do_on_forced_kernels(forced_kernels: str) -> None:
    test_greedy_and_random_rows_obey_and_their_neighbours_do_not_notice()
