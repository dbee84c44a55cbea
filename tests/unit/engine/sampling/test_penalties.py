"""Penalties: against transformers and a plain reference, on rows side by side, token by token, and after slot reuse."""

import numpy as np
import pytest
import torch
from quire_engine.sampling.penalties import PenaltyState, apply_penalties
from quire_engine.sampling_params import SamplingParams
from transformers import RepetitionPenaltyLogitsProcessor

VOCAB_SIZE = 50
MAX_TOKENS = 200
KINDS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(frequency_penalty=0.9),
    SamplingParams(presence_penalty=-1.5),
    SamplingParams(repetition_penalty=0.6, frequency_penalty=-0.4, presence_penalty=2.0),
]


def plain(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """vLLM's definition for one row, token by token."""
    logits = logits.clone()
    for token_id in set(prompt + output):
        value = logits[token_id]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value = value - params.frequency_penalty * output.count(token_id)
        logits[token_id] = value - params.presence_penalty * (token_id in output)
    return logits


def random_tokens(rng: np.random.Generator, number: int) -> list[int]:
    tokens: list[int] = rng.integers(0, VOCAB_SIZE, number).tolist()
    return tokens


def penalized(state: PenaltyState, slots: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    penalties = state.gather(np.array(slots))
    if penalties is not None:
        apply_penalties(logits, penalties)
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.3, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    rng = np.random.default_rng(0)
    state = PenaltyState(8, VOCAB_SIZE, MAX_TOKENS)
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 5
    prompts = [random_tokens(rng, int(rng.integers(1, 40))) for _ in range(8)]
    for slot, tokens in enumerate(prompts):
        state.add(slot, SamplingParams(repetition_penalty=penalty), tokens, len(tokens) // 2)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = [processor(torch.tensor([tokens]), logits[i : i + 1].clone())[0] for i, tokens in enumerate(prompts)]
    assert torch.equal(penalized(state, list(range(8)), logits), torch.stack(expected))


def test_rows_of_every_kind_side_by_side_as_tokens_come() -> None:
    """Slots in any order, requests that come and go, and each step as if every row had been alone from its start."""
    rng = np.random.default_rng(1)
    generator = torch.Generator().manual_seed(1)
    state = PenaltyState(6, VOCAB_SIZE, MAX_TOKENS)
    requests: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for step in range(120):
        for slot in range(6):
            if slot not in requests or rng.random() < 0.05:  # the slot's next user
                params = KINDS[int(rng.integers(len(KINDS)))]
                prompt, output = random_tokens(rng, int(rng.integers(1, 20))), random_tokens(rng, int(rng.integers(5)))
                requests[slot] = (params, prompt, output)
                state.add(slot, params, prompt + output, len(prompt))
        slots = rng.permutation(6)[: int(rng.integers(1, 7))].tolist()
        logits = torch.randn(len(slots), VOCAB_SIZE, generator=generator) * 4
        logits[:, step % VOCAB_SIZE] = float("-inf")  # a mask stays a mask
        expected = [plain(row, *requests[slot]) for row, slot in zip(logits, slots, strict=True)]
        torch.testing.assert_close(penalized(state, slots, logits), torch.stack(expected), rtol=0, atol=1e-5)
        for row, slot in enumerate(slots):
            if not requests[slot][0].has_penalties:
                assert torch.equal(penalized(state, slots, logits)[row], logits[row])
        sampled = random_tokens(rng, len(slots))
        state.append(np.array(slots), np.array(sampled))
        for slot, token_id in zip(slots, sampled, strict=True):
            requests[slot][2].append(token_id)


def test_a_request_that_comes_back_counts_as_if_it_had_stayed() -> None:
    rng = np.random.default_rng(2)
    params = KINDS[-1]
    prompt, output = random_tokens(rng, 30), random_tokens(rng, 60)
    state = PenaltyState(2, VOCAB_SIZE, MAX_TOKENS)
    state.add(0, params, prompt, len(prompt))
    for token_id in output:
        state.append(np.array([0]), np.array([token_id]))
    state.add(1, params, prompt + output, len(prompt))
    logits = torch.randn(1, VOCAB_SIZE).expand(2, VOCAB_SIZE) * 4
    stayed, back = penalized(state, [0, 1], logits)
    assert torch.equal(stayed, back)


def test_without_penalties_there_is_nothing_to_do() -> None:
    state = PenaltyState(3, VOCAB_SIZE, MAX_TOKENS)
    state.add(0, KINDS[1], [1, 2, 3], 3)
    state.add(1, SamplingParams(), [1, 2, 3], 3)
    assert state.gather(np.array([1, 2])) is None
    assert state.gather(np.array([0])) is not None
    state.add(0, SamplingParams(), [1, 2, 3], 3)
    assert state.gather(np.array([0, 1, 2])) is None
