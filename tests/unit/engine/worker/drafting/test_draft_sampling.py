"""What is drawn from a draft model's logits, and with which noise."""

import numpy as np
import pytest
import torch
from quire_engine.device.transfer import CPU
from quire_engine.draft_chances import DraftChances
from quire_engine.sampling import draft_positions
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.drafting.draft_sampling import DraftSampling
from quire_kernels import probabilities, sample
from support.drafting import add_request, make_batch
from support.scheduling import VOCAB_SIZE

PARAMS = [
    {"temperature": 1.0, "seed": 2**63 + 5},
    {"temperature": 0},
    {"temperature": 0.7, "seed": 8, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.5, "seed": 9},
]
COUNTS = [3, 3, 2, 1]
NUM_ROWS = [4, 3, 2]
LENGTHS = [5, 9, 2, 7]


def make_requests() -> tuple[InputBatch, np.ndarray]:
    batch = make_batch()
    slots = [add_request(batch, f"r{i}", range(length), [i], **params)
             for i, (length, params) in enumerate(zip(LENGTHS, PARAMS, strict=True))]  # fmt: skip
    return batch, np.array(slots)


def make_logits() -> list[torch.Tensor]:
    """By place."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, VOCAB_SIZE, generator=generator) * 2 for rows in NUM_ROWS]


def sampled(batch: InputBatch, slots: np.ndarray, logits_NV: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the target would sample there by the same logits."""
    own = slots[: len(logits_NV)]
    columns = [torch.from_numpy(column[own]) for column in (batch.temperature, batch.min_p, batch.top_k, batch.top_p)]
    return sample(logits_NV, *columns, torch.from_numpy(batch.seed[own].view(np.int64)), positions)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 0, 1]])
def test_drafts_have_the_noise_that_the_target_has_in_their_place(order: list[int]) -> None:
    batch, slots = make_requests()
    slots, lengths = slots[order], [LENGTHS[i] for i in order]
    sampling = DraftSampling(batch, slots, np.array(COUNTS), CPU)
    assert (sampling.num_places, [sampling.num_rows(place) for place in range(4)]) == (3, [*NUM_ROWS, 0])
    expected: list[list[int]] = [[] for _ in order]
    chances: list[list[float]] = [[] for _ in order]
    for place, logits_NV in enumerate(make_logits()):
        token_ids = sampling.draw(logits_NV.clone())
        positions = torch.tensor([length + place for length in lengths[: len(logits_NV)]])
        assert token_ids.tolist() == sampled(batch, slots, logits_NV, positions).tolist()
        for row, token_id in enumerate(token_ids.tolist()):
            expected[row].append(token_id)
            chances[row].append(max(float(logits_NV[row].softmax(0)[token_id]), 1e-3))
    drafts = sampling.drafts()
    assert [own.start for own in drafts] == lengths, "behind the known tokens"
    assert [own.token_ids for own in drafts] == expected
    assert [len(own.token_ids) for own in drafts] == COUNTS
    for own, want in zip(drafts, chances, strict=True):
        assert own.chances == pytest.approx(want, rel=1e-5)
        assert all(0 < chance <= 1 for chance in own.chances)
    assert all(sampling.distributions(row) is None for row in range(4))


def test_a_method_may_have_fewer_places_than_are_wanted() -> None:
    batch, slots = make_requests()
    sampling = DraftSampling(batch, slots, np.array(COUNTS), CPU)
    for logits_NV in make_logits()[:2]:
        sampling.draw(logits_NV)
    assert [len(own.token_ids) for own in sampling.drafts()] == [2, 2, 2, 1]


def unlikely(chance: float) -> DraftChances:
    """Where drafts of this chance were all wrong."""
    chances = DraftChances()
    for _ in range(100):
        chances.learn(chance, is_accepted=False)
    return chances


@pytest.mark.parametrize("by_chance", [None, np.array([True, False, False, True])])
def test_no_further_place_is_drawn_where_all_have_too_little_chance(by_chance: np.ndarray | None) -> None:
    """Of greedy requests' drafts, where sampled ones' are all accepted; but for those to be accepted by chance, which
    must not depend on the token."""
    batch, slots = make_requests()
    certain = torch.zeros(4, VOCAB_SIZE)
    certain[:, 5] = 100.0
    # The second of them is greedy.
    for greedy, sampled, order, stops in (
        (unlikely(1.0), DraftChances(), [0, 1, 2, 3], False),
        (unlikely(1.0), DraftChances(), [1], True),
        (DraftChances(), unlikely(1.0), [0, 2, 3], by_chance is None),
        (unlikely(1.0), unlikely(1.0), [0, 1, 2, 3], by_chance is None),
    ):
        own = None if by_chance is None else by_chance[order]
        sampling = DraftSampling(
            batch, slots[order], np.array([3] * len(order)), CPU, own, least_chance=0.5, chances=[sampled, greedy]
        )
        assert sampling.goes_on(), "the first is always drawn"
        sampling.draw(certain[: len(order)])
        assert sampling.goes_on() != stops
        assert sampling.has_stopped == stops
    ends = DraftSampling(batch, slots[:1], np.array([1]), CPU, least_chance=0.5, chances=[DraftChances()] * 2)
    ends.draw(certain[:1])
    assert not ends.goes_on(), "nobody wants more"
    assert not ends.has_stopped


def test_logits_that_are_not_finite_take_no_drafts_from_others() -> None:
    batch, slots = make_requests()
    sampling = DraftSampling(
        batch, slots[:2], np.array([2, 2]), CPU, least_chance=0.1, chances=[DraftChances(), DraftChances()]
    )
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0], logits[1, 5] = float("nan"), 100.0
    sampling.draw(logits)
    assert sampling.goes_on(), "for the other"
    sampling.draw(logits)
    first, second = sampling.drafts()
    assert first.chances == [pytest.approx(1e-3)] * 2
    assert second.token_ids == [5, 5]


def test_a_token_without_a_chance_has_a_little() -> None:
    """The greedy choice always has some; a mask may leave only what the draft model takes for impossible."""
    batch = make_batch()
    slot = add_request(batch, "r0", [1], [0], temperature=0)
    sampling = DraftSampling(batch, np.array([slot]), np.array([1]), CPU)
    logits = torch.full((1, VOCAB_SIZE), -float("inf"))
    logits[0, 5] = 1.0
    assert sampling.draw(logits).tolist() == [5]
    assert sampling.drafts()[0].chances == [1.0]
    flat = DraftSampling(batch, np.array([slot]), np.array([1]), CPU)
    flat.draw(torch.zeros(1, VOCAB_SIZE * 100))
    assert flat.drafts()[0].chances == [pytest.approx(1e-3)]


def test_drafts_to_be_accepted_by_chance_have_noise_of_their_own_and_a_distribution() -> None:
    batch, slots = make_requests()
    by_chance = np.array([True, False, True, False])
    sampling = DraftSampling(batch, slots, np.array(COUNTS), CPU, by_chance)
    drawn, wanted = [], make_logits()
    for place, logits_NV in enumerate(wanted):
        positions = torch.tensor([length + place for length in LENGTHS[: len(logits_NV)]])
        own = torch.from_numpy(by_chance[: len(logits_NV)])
        positions = torch.where(own, draft_positions(positions), positions)
        drawn.append(sampling.draw(logits_NV.clone()).tolist())
        assert drawn[-1] == sampled(batch, slots, logits_NV, positions).tolist()
    drafts = sampling.drafts()
    assert [own.start for own in drafts] == LENGTHS
    assert [own.token_ids for own in drafts] == [[ids[row] for ids in drawn if row < len(ids)] for row in range(4)]
    assert len(set(drafts[0].chances + drafts[2].chances)) == 1, "whether it is computed must not depend on the draft"
    assert 0 < drafts[0].chances[0] < 1
    assert len(set(drafts[1].chances)) == 3
    assert sampling.distributions(1) is None
    assert sampling.distributions(3) is None
    for row in (0, 2):
        params = [torch.from_numpy(c[slots[[row]]]) for c in (batch.temperature, batch.min_p, batch.top_k, batch.top_p)]
        rows = [place_NV[row : row + 1] for place_NV in wanted if row < len(place_NV)]
        expected = torch.cat([probabilities(logits_1V, *params) for logits_1V in rows])
        found = sampling.distributions(row)
        assert found is not None
        torch.testing.assert_close(found, expected)
        assert len(found) == COUNTS[row]
