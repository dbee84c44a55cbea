"""The sampler as a whole: rows of every kind side by side, and the distributions it draws from."""

from typing import Any

import numpy as np
import pytest
import torch
from quire_engine.sampling import Sampler, SamplingMetadata
from quire_engine.sampling.penalties import PenaltyState
from quire_engine.sampling.token_constraints import TokenConstraintState
from quire_engine.sampling_params import SamplingParams


def metadata(rows: int, **columns: Any) -> SamplingMetadata:
    """Greedy rows unless a column says otherwise; a scalar holds for all rows."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        value = torch.as_tensor(columns.get(name, default), dtype=dtype)
        return value.expand(rows) if value.ndim == 0 else value

    temperature = column("temperature", 0.0, torch.float32)
    return SamplingMetadata(
        temperature=temperature,
        top_p=column("top_p", 1.0, torch.float32),
        top_k=column("top_k", 10**6, torch.int64),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=column("seeds", 0, torch.int64),
        positions=column("positions", 0, torch.int64),
        num_logprobs=columns.get("num_logprobs", {}),
        forbidden=columns.get("forbidden", []),
        all_greedy=not temperature.any(),
        penalties=columns.get("penalties"),
        token_constraints=columns.get("token_constraints"),
    )


def test_greedy_takes_the_most_likely_among_random_rows() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    temperature = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.5])
    tokens = Sampler()(logits.clone(), metadata(6, temperature=temperature)).wait().token_ids
    assert [tokens[row] for row in (0, 2, 4)] == [int(logits[row].argmax()) for row in (0, 2, 4)]


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 30)
    want = logits.log_softmax(-1)
    output = Sampler()(
        logits.clone(),
        metadata(
            4,
            temperature=torch.tensor([0.0, 0.7, 0.0, 0.0]),
            top_k=2,
            num_logprobs={0: 3, 1: 2, 3: 0},
            forbidden=[(0, [int(logits[0].argmax())])],
        ),
    ).wait()
    assert output.logprobs[2] is None
    for row, number in ((0, 3), (1, 2), (3, 0)):
        entries = output.logprobs[row]
        assert entries is not None
        assert len(entries) == number + 1
        assert entries[0][0] == output.token_ids[row]
        assert [entry[0] for entry in entries[1:]] == want[row].topk(number).indices.tolist()
        for token_id, logprob, rank in entries:
            assert logprob == pytest.approx(float(want[row, token_id]), abs=1e-6)
            assert rank == int((want[row] > want[row, token_id]).sum()) + 1
    assert output.logprobs[0] is not None
    assert output.logprobs[0][0][2] == 2, "the most likely token was forbidden, so the second was taken"


def test_biases_come_before_penalties_and_neither_shows_in_logprobs() -> None:
    """-1 + 3 is positive, so the repetition penalty divides it: 1.0 is less than 1.5, and 9 is masked."""
    constraints = TokenConstraintState(2, 4)
    constraints.add(1, SamplingParams(logit_bias={0: 3.0, 2: 5.0}, bad_words_token_ids=[[2]]))
    penalties = PenaltyState(2, 4, 8)
    penalties.add(1, SamplingParams(repetition_penalty=2.0), [0, 0], 1)
    logits = torch.tensor([[-1.0, 1.5, 9.0, 0.0]] * 2)
    output = Sampler()(
        logits.clone(),
        metadata(
            2,
            num_logprobs={0: 1, 1: 1},
            penalties=penalties.gather(np.array([0, 1])),
            token_constraints=constraints.gather(np.array([0, 1]), lambda slot, number: []),
        ),
    ).wait()
    assert output.token_ids == [2, 1]
    assert output.logprobs[1] is not None
    assert output.logprobs[1][0][1] == pytest.approx(float(logits[1].log_softmax(-1)[1]), abs=1e-6)
    assert [entry[::2] for entry in output.logprobs[1]] == [(1, 2), (2, 1)]


@pytest.mark.parametrize(
    ("columns", "probabilities"),
    [
        ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 1.0, "top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"temperature": 1.0, "min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
    ],
    ids=["temperature-1", "temperature-0.5", "top-k", "top-p", "min-p"],
)
def test_frequencies_match_the_distribution(columns: dict[str, float], probabilities: list[float]) -> None:
    """By chi-square with at most 3 degrees of freedom: a true sampler exceeds 16.3 once in a thousand runs."""
    draws = 20_000
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(draws, 4)
    tokens = Sampler()(
        logits.clone(), metadata(draws, **columns, seeds=torch.arange(draws), positions=torch.arange(draws) % 100)
    )
    counts = torch.bincount(tokens.token_ids_S, minlength=4).tolist()
    chi_square = 0.0
    for count, probability in zip(counts, probabilities, strict=True):
        if probability == 0:
            assert count == 0
        else:
            chi_square += (count - draws * probability) ** 2 / (draws * probability)
    assert chi_square < 16.3
