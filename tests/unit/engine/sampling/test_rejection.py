"""Verified drafts: tokens as the target model's alone, whatever drafts them. By chi-square tests with fixed seeds."""

from dataclasses import dataclass, field

import pytest
import torch
from quire_engine.sampling import draft_positions, verify_drafts
from quire_kernels import probabilities, sample
from support.sampling import columns, p_value, without_noise

INFINITY = float("inf")
DRAWS = 120_000


@dataclass
class Case:
    """Logits and parameters of the target and of the draft model."""

    target: list[float]
    draft: list[float]
    target_params: dict[str, float] = field(default_factory=dict)
    draft_params: dict[str, float] = field(default_factory=dict)


FALLING = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0]
NEAR = [2.1, 1.4, 1.0, 0.3, 0.2, -0.5, -1.3, -2.0]
RISING = FALLING[::-1]
LEFT, RIGHT = [1.0, 0.5, 0.0] + [-INFINITY] * 5, [-INFINITY] * 3 + [0.0, 1.0, 0.3, 0.2, 0.1]
CASES = {
    "equal": Case(FALLING, FALLING),
    "good": Case(FALLING, NEAR),
    "bad": Case(FALLING, RISING),
    "disjoint": Case(LEFT, RIGHT),
    "masked target": Case(LEFT, FALLING),
    "masked draft": Case(FALLING, RIGHT),
    "temperatures": Case(FALLING, NEAR, {"temperature": 0.6}, {"temperature": 1.7}),
    "top-k": Case(FALLING, NEAR, {"top_k": 3}, {"top_k": 5}),
    "top-k of the target": Case(FALLING, RISING, {"top_k": 3}),
    "top-k of the draft": Case(FALLING, RISING, {}, {"top_k": 2}),
    "top-p": Case(FALLING, RISING, {"top_p": 0.8}, {"top_p": 0.7}),
    "min-p": Case(FALLING, NEAR, {"min_p": 0.2}, {"min_p": 0.1}),
    "all": Case(FALLING, NEAR, {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0.5}),
    "certain draft": Case(FALLING, RISING, {}, {"temperature": 0.0}),
    "greedy target": Case(RISING, FALLING, {"temperature": 0.0}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_are_distributed_as_the_targets(case: Case) -> None:
    noise = {"seeds": torch.arange(DRAWS), "positions": torch.full((DRAWS,), 7)}
    target, draft = (torch.tensor(logits).expand(DRAWS, -1) for logits in (case.target, case.draft))
    target_params, draft_params = without_noise(DRAWS, **case.target_params), without_noise(DRAWS, **case.draft_params)
    q = probabilities(draft, **draft_params)
    drafts = sample(draft, **draft_params, seeds=noise["seeds"], positions=draft_positions(noise["positions"]))
    assert p_value(torch.bincount(drafts, minlength=8), q[0]) > 1e-4
    tokens = verify_drafts(target, **target_params, **noise, drafts=drafts, draft_probabilities_RV=q)

    p = probabilities(target[:1], **without_noise(1, **case.target_params))[0]
    assert p_value(torch.bincount(tokens, minlength=8), p) > 1e-4
    # What p and q have in common is accepted: section 3.2 of Leviathan et al.
    common = torch.minimum(p, q[0]).sum().clamp(max=1.0)
    assert p_value(torch.bincount((tokens == drafts).long(), minlength=2), torch.stack((1 - common, common))) > 1e-4


def test_no_two_uses_of_a_position_share_noise() -> None:
    """A token without a draft, a draft, and the token in its place, of the same seed and position."""
    noise = {"seeds": torch.arange(DRAWS), "positions": torch.full((DRAWS,), 7)}
    target, draft = torch.tensor(FALLING).expand(DRAWS, -1), torch.tensor(RISING).expand(DRAWS, -1)
    p, q = target[0].softmax(0), draft.softmax(-1)
    plain = sample(target, **without_noise(DRAWS), **noise)
    drafts = sample(draft, **without_noise(DRAWS), seeds=noise["seeds"], positions=draft_positions(noise["positions"]))
    tokens = verify_drafts(target, **without_noise(DRAWS), **noise, drafts=drafts, draft_probabilities_RV=q)
    assert p_value(torch.bincount(plain * 8 + drafts, minlength=64), torch.outer(p, q[0])) > 1e-4
    assert p_value(torch.bincount(plain * 8 + tokens, minlength=64), torch.outer(p, p)) > 1e-4


def sequences(target: torch.Tensor, draft: torch.Tensor, num_drafts: int, length: int) -> torch.Tensor:
    """[DRAWS, length] tokens after token 0, of models that are tables: [last token, next token] logits.

    Every step drafts, verifies the drafts, and samples one token more, as if nobody knew yet which drafts are accepted.
    The next one goes on after the first that is not, so it comes back to positions that had drafts.
    """
    tokens = torch.zeros(DRAWS, length + num_drafts + 1, dtype=torch.int64)
    num_tokens = torch.ones(DRAWS, dtype=torch.int64)
    while len(rows := (num_tokens <= length).nonzero().squeeze(1)):
        own, start = without_noise(len(rows)), num_tokens[rows]
        last, is_kept = tokens[rows, start - 1], torch.ones(len(rows), dtype=torch.bool)
        for offset in range(num_drafts + 1):
            noise = {"seeds": rows, "positions": start + offset}
            if offset < num_drafts:
                q = probabilities(draft[last], **own)
                drafts = sample(draft[last], **own, seeds=rows, positions=draft_positions(start + offset))
                chosen = verify_drafts(target[last], **own, **noise, drafts=drafts, draft_probabilities_RV=q)
            else:
                drafts = chosen = sample(target[last], **own, **noise)
            kept = rows[is_kept]
            tokens[kept, num_tokens[kept]] = chosen[is_kept]
            num_tokens[kept] += 1
            is_kept &= chosen == drafts
            last = drafts
    return tokens[:, 1 : length + 1]


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_sequences_are_distributed_as_the_targets(num_drafts: int) -> None:
    target, draft = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
    first, second, third, fourth = sequences(target, draft, num_drafts, 4).unbind(1)
    p = target.double().softmax(-1)
    joint = torch.einsum("a,ab,bc,cd->abcd", p[0], p, p, p)
    counts = torch.bincount(((first * 4 + second) * 4 + third) * 4 + fourth, minlength=256)
    assert p_value(counts, joint) > 1e-4


def verify(target: list[float], q: list[float], draft: int, rows: int = 500, **values: float) -> set[int]:
    """The tokens of rows that differ in their seeds."""
    noise = {"seeds": torch.arange(rows), "positions": torch.full((rows,), 3)}
    logits, q_RV = torch.tensor(target).expand(rows, -1), torch.tensor(q).expand(rows, -1)
    drafts = torch.full((rows,), draft)
    return set(
        verify_drafts(
            logits, **without_noise(rows, **values), **noise, drafts=drafts, draft_probabilities_RV=q_RV
        ).tolist()
    )


def test_a_draft_that_the_target_masks_is_never_accepted() -> None:
    assert verify([0.0, -INFINITY, 0.0], [0.0, 1.0, 0.0], 1) == {0, 2}
    assert verify([2.0, 1.0, 0.0], [0.0, 1.0, 0.0], 1, top_k=1) == {0}
    assert verify([2.0, -INFINITY, -INFINITY], [1.0, 1e-12, 0.0], 1) == {0}, "the residual is rounded to nothing"


def test_a_greedy_row_has_the_most_likely_token() -> None:
    for q in ([0.9, 0.1, 0.0], [0.0, 0.0, 1.0], [1.0, 1e-12, 0.0], [1e-12, 1.0, 1e-12]):
        for draft in (0, 1, 2):
            assert verify([1.0, 3.0, 2.9], q, draft, temperature=0.0) == {1}


def test_the_target_takes_the_place_of_a_residual_that_is_rounded_to_nothing() -> None:
    """A q that is larger than p by rounding everywhere: a draft that is rejected nonetheless is rare, unless it has
    next to no probability by p."""
    p = torch.tensor([0.0, 1.0, -90.0]).softmax(0)
    tokens = verify([0.0, 1.0, -90.0], [float(p[0]) * 1.0001, float(p[1]) * 1.0001, 1e-7], 2)
    assert tokens == {0, 1}


def test_a_draft_of_probability_0_does_no_harm() -> None:
    assert verify([0.0, 1.0], [1.0, 0.0], 1) == {1}
    assert verify([0.0, -INFINITY], [1.0, 0.0], 1) == {0}


def test_all_but_one_token_may_be_masked_in_both() -> None:
    assert verify([-INFINITY, 0.0, -INFINITY], [0.0, 1.0, 0.0], 1, top_p=0.5, min_p=0.1) == {1}
    assert verify([-INFINITY, 0.0, -INFINITY], [0.0, 0.0, 1.0], 2, top_k=2) == {1}


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows, vocab_size = 24, 500
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "logits_RV": torch.randn(rows, vocab_size, generator=generator) * 2,
        **columns(rows, seeds=torch.arange(rows) * 2**40 - 3, positions=torch.arange(rows) + 2**30 - rows),
        "temperature": torch.linspace(0, 1.5, rows),
        "top_k": torch.arange(rows) * 20 + 1,
        "top_p": torch.linspace(1.0, 0.5, rows),
        "draft_probabilities_RV": (torch.randn(rows, vocab_size, generator=generator) * 2).softmax(-1),
        "drafts": torch.randint(0, vocab_size, (rows,), generator=generator),
    }
    before = {name: value.clone() for name, value in arguments.items()}
    together = verify_drafts(**arguments).tolist()
    alone = [
        int(verify_drafts(**{name: value[row : row + 1] for name, value in arguments.items()})) for row in range(rows)
    ]
    assert together == alone
    assert len(set(together)) > rows // 2
    assert all(torch.equal(value, before[name]) for name, value in arguments.items())
    assert verify_drafts(**{name: value[:0] for name, value in arguments.items()}).tolist() == []
