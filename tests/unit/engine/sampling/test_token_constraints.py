"""Allowed tokens, bad words and biases: against transformers, on rows side by side, and after slot reuse."""

import random

import numpy as np
import torch
from quire_engine.sampling.token_constraints import BadWords, TokenConstraintState, apply_token_constraints
from quire_engine.sampling_params import SamplingParams
from transformers import NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor, SequenceBiasLogitsProcessor

VOCAB_SIZE = 12
"""Small, so that bad words come up often."""


def constrained(
    state: TokenConstraintState, slots: list[int], logits: torch.Tensor, outputs: dict[int, list[int]]
) -> torch.Tensor:
    logits = logits.clone()
    constraints = state.gather(np.array(slots), lambda row, number: outputs[slots[row]][-number:] if number else [])
    if constraints is not None:
        apply_token_constraints(logits, constraints)
    return logits


def reference(params: SamplingParams, output: list[int], row: torch.Tensor) -> torch.Tensor:
    """transformers' processors of the same meaning, for one row alone."""
    ids, scores = torch.tensor([output], dtype=torch.int64), row[None].clone()
    if params.allowed_token_ids is not None:
        allowed = params.allowed_token_ids
        scores = PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1)(ids, scores)
    if params.bad_words_token_ids:
        scores = NoBadWordsLogitsProcessor(params.bad_words_token_ids)(ids, scores)
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(k,): v for k, v in params.logit_bias.items()})(ids, scores)
    return scores[0]


def random_params(rng: random.Random) -> SamplingParams:
    def token_ids(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(low, high))]

    return SamplingParams(
        allowed_token_ids=token_ids(3, 20) if rng.random() < 0.4 else None,
        bad_words_token_ids=[token_ids(1, 4) for _ in range(rng.randint(1, 40))] if rng.random() < 0.5 else [],
        logit_bias={k: rng.uniform(-9, 9) for k in token_ids(1, 6)} if rng.random() < 0.4 else None,
    )


def test_rows_of_every_kind_side_by_side_are_those_of_transformers() -> None:
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    state = TokenConstraintState(6, VOCAB_SIZE)
    users: dict[int, SamplingParams] = {}
    outputs: dict[int, list[int]] = {}
    num_masked = 0
    for _ in range(300):
        for slot in range(6):
            if slot not in users or rng.random() < 0.2:  # the slot's next user
                users[slot] = random_params(rng)
                outputs[slot] = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
                state.add(slot, users[slot])
        slots = rng.sample(range(6), rng.randint(1, 6))
        logits = torch.randn(len(slots), VOCAB_SIZE, generator=generator)
        got = constrained(state, slots, logits, outputs)
        expected = [reference(users[slot], outputs[slot], row) for row, slot in zip(logits, slots, strict=True)]
        torch.testing.assert_close(got, torch.stack(expected), rtol=0, atol=1e-5)
        num_masked += int(got.isinf().sum())
        for slot in slots:
            outputs[slot].append(rng.randrange(VOCAB_SIZE))
    assert num_masked > 1000, "hardly anything was masked, so this test shows little"


def test_bad_words_count_in_the_output_alone() -> None:
    bad_words = BadWords([[5], [1, 2], [1, 2, 3], [9, 2, 3]])
    assert bad_words.max_prefix == 2
    assert sorted(bad_words.completions([])) == [5]
    assert sorted(bad_words.completions([1])) == [2, 5]
    assert sorted(bad_words.completions([2])) == [5], "the word began in the prompt"
    assert sorted(bad_words.completions([1, 2])) == [3, 5]
    assert sorted(bad_words.completions([9, 2])) == [3, 5]


def test_a_bias_does_not_undo_a_mask() -> None:
    state = TokenConstraintState(1, VOCAB_SIZE)
    state.add(0, SamplingParams(allowed_token_ids=[1, 2], logit_bias={2: 3.0, 3: 100.0}, bad_words_token_ids=[[1]]))
    got = constrained(state, [0], torch.zeros(1, VOCAB_SIZE), {0: []})[0]
    assert got[2] == 3.0
    assert got.isinf().sum() == VOCAB_SIZE - 1


def test_without_constraints_there_is_nothing_to_do() -> None:
    state = TokenConstraintState(3, VOCAB_SIZE)
    state.add(0, SamplingParams(allowed_token_ids=[1], logit_bias={1: 1.0}, bad_words_token_ids=[[1, 2]]))
    state.add(1, SamplingParams())
    assert state.gather(np.array([1, 2]), lambda row, number: []) is None
    state.add(0, SamplingParams(logit_bias={4: 1.0}))
    logits = torch.zeros(2, VOCAB_SIZE)
    expected = logits.clone()
    expected[1, 4] = 1.0
    assert torch.equal(constrained(state, [1, 0], logits, {0: [1]}), expected), "something of the last user is left"
    state.add(0, SamplingParams())
    assert state.gather(np.array([0, 1, 2]), lambda row, number: []) is None
