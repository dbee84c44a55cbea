"""A step's arrays: those of a step with one request are that request's part of a step with more."""

from dataclasses import fields
from random import Random

import numpy as np
import pytest
from quire_engine.messages import SchedulerOutput
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import SampledRows, StepInputs
from support.drafting import BLOCK_SIZE, MAX_MODEL_LEN, add_request, make_batch
from support.scheduling import VOCAB_SIZE

NUM_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE


def arrays(columns: StepInputs | SampledRows) -> dict[str, object]:
    """Its arrays as lists, with their types."""
    found = {field.name: getattr(columns, field.name) for field in fields(columns) if field.name != "sampled"}
    return {
        name: (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else [part.tolist() for part in value]
        for name, value in found.items() if name not in ("request_ids", "drafts", "embedded")
    }  # fmt: skip


def step(batch: InputBatch, scheduled: dict[str, int], drafts: dict[str, list[int]]) -> StepInputs:
    return StepInputs.of(batch, SchedulerOutput(scheduled, draft_token_ids=drafts))


@pytest.mark.parametrize("seed", range(30))
def test_a_step_of_one_request(seed: int) -> None:
    """A part of a prompt, its end, a decode, with drafts or a token that is still on its way, before another request's
    token, which is taken away again."""
    random = Random(seed)
    batch = make_batch()
    length = random.randint(2, 40)
    add_request(batch, "other", [1], [NUM_BLOCKS])
    slot = add_request(batch, "one", [random.randrange(VOCAB_SIZE) for _ in range(length)], range(NUM_BLOCKS))
    kind = random.choice(["part", "end", "decode", "drafts", "ahead"])
    drafts: dict[str, list[int]] = {}
    if kind == "part":
        number = random.randint(1, length - 1)
    elif kind == "end":
        number = length
    else:
        batch.num_computed_tokens[slot] = length - 1
        number = 1
    if kind == "drafts":
        drafts = {"one": [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 5))]}
        batch.place_drafts("one", drafts["one"])
        number += len(drafts["one"])
    elif kind == "ahead":
        batch.expect_tokens(np.array([slot]))
        batch.num_computed_tokens[slot] = length
    alone, both = (step(batch, scheduled, drafts) for scheduled in ({"one": number}, {"one": number, "other": 1}))
    num_rows = len(both.sampled.slots) - 1
    assert num_rows == (0 if kind == "part" else 1 + len(drafts.get("one", ())))
    assert alone.request_ids == ["one"]
    assert alone.sampled.request_ids == (["one"] if num_rows else [])
    assert alone.sampled.drafts == drafts
    assert alone.samples_every_token == (num_rows == number)
    for own, whole in ((arrays(alone), arrays(both)), (arrays(alone.sampled), arrays(both.sampled))):
        for name, value in own.items():
            if name == "slot_mappings":
                assert value == [part[:-1] for part in whole[name]], name  # type: ignore[attr-defined]
                continue
            dtype, numbers = whole[name]  # type: ignore[misc]
            assert value == (dtype, numbers[:-1]), name


@pytest.mark.parametrize("count", [0, 1, 4])
def test_tokens_of_one_request_are_stored_like_those_of_many(count: int) -> None:
    token_ids = [7, 3, 7, 9][:count]
    found = []
    for others in ([], [[5, 6]]):
        batch = make_batch()
        slots = [add_request(batch, name, [1, 2], [place], repetition_penalty=1.5) for place, name in enumerate("ab")]
        own = np.array(slots[: 1 + len(others)])
        batch.settle_lists(own, batch.num_known_tokens[own], [token_ids, *others])
        penalties = batch.penalties.gather(np.array(slots[:1]), {})
        assert penalties is not None
        found.append((
            batch.token_ids[slots[0], :8].tolist(), batch.num_known_tokens[slots[0]], batch.num_tokens[slots[0]],
            {field.name: getattr(penalties, field.name).tolist() for field in fields(penalties)},
        ))  # fmt: skip
    assert found[0] == found[1]
    assert found[0][0][: 2 + count] == [1, 2, *token_ids]
