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
        for name, value in found.items() if name not in ("request_ids", "drafts", "embedded", "states", "bidirectional")
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


def expected_states(
    table: list[int], base: int, start: int, end: int, num_drafts: int
) -> tuple[int, int, list[tuple[int, int]]]:
    """How many tokens a request computes again, the block whose ring its rows are in, and after how many tokens which
    block gets a state."""
    stores = []
    for length in range(base + 1, end - num_drafts + 1):
        block = table[(length - 1) // BLOCK_SIZE]
        if length % BLOCK_SIZE == 0 and block >= 0:
            stores.append((length - base, block))
    target = table[(end - 1) // BLOCK_SIZE]
    last = (end - num_drafts - base, target)
    return start - base, target, stores if last in stores else [*stores, last]


@pytest.mark.parametrize("seed", range(30))
def test_states_are_laid_out_as_a_loop_over_the_tokens_says(seed: int) -> None:
    """Several steps of some requests: parts of prompts, and drafts of which some are accepted."""
    random = Random(seed)
    batch = InputBatch(4, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE, num_groups=2, has_states=True)
    slots = np.arange(random.randint(1, 4))
    batch.block_tables[1][slots, :NUM_BLOCKS] = [[random.randrange(100) for _ in range(NUM_BLOCKS)] for _ in slots]
    batch.state_blocks[slots] = -1
    computed = [0] * len(slots)
    for _ in range(12):
        ends, drafts, expected, sources = [], [], [], batch.state_blocks[slots].tolist()
        for slot in slots.tolist():
            number = random.choice([1, 1, random.randint(1, 3 * BLOCK_SIZE)])
            end = min(computed[slot] + number, MAX_MODEL_LEN)
            computed[slot] = min(computed[slot], end - 1)
            num_drafts = random.choice([0, random.randrange(end - computed[slot])])
            table = batch.block_tables[1][slot]
            for index in range((end - 1) // BLOCK_SIZE):  # some have no place for a state
                table[index] = -1 if random.random() < 0.3 and index != (end - 1) // BLOCK_SIZE else table[index]
            table[(end - 1) // BLOCK_SIZE] = random.randrange(100)
            base = int(batch.num_state_tokens[slot])
            computed[slot] = max(computed[slot], base)
            if computed[slot] >= end - num_drafts:
                num_drafts = end - computed[slot] - 1
            ends.append(end)
            drafts.append(num_drafts)
            expected.append(expected_states(table.tolist(), base, computed[slot], end, num_drafts))
        rows = batch.state_rows(slots, np.array(computed), np.array(ends), np.array(drafts))
        assert rows.sources.tolist() == sources
        for number, (num_replayed, target, stores) in enumerate(expected):
            own = slice(*rows.store_start_loc[number : number + 2].tolist())
            assert (rows.num_replayed[number], rows.targets[number]) == (num_replayed, target)
            assert list(zip(rows.store_lens[own].tolist(), rows.store_blocks[own].tolist(), strict=True)) == stores
        assert len(rows.store_lens) == len(rows.store_blocks) == rows.store_start_loc[-1]
        computed = [random.randint(end - count, end) for end, count in zip(ends, drafts, strict=True)]
        if max(computed) == MAX_MODEL_LEN:
            break


@pytest.mark.parametrize(("most", "expected"), [(5, ["a", "bc", "d"]), (6, ["a", "bc", "d"]), (8, ["ab", "cd"])])
def test_parts_of_a_step(most: int, expected: list[str]) -> None:
    """Each is what a step of its requests alone has."""
    batch, lengths = make_batch(), {"a": 5, "b": 3, "c": 2, "d": 4}
    for number, (name, length) in enumerate(lengths.items()):
        add_request(batch, name, [10 * number + i for i in range(length)], [number])
    whole, end = step(batch, lengths, {}), 0
    for names, (rows, part) in zip(expected, whole.split(most), strict=True):
        alone = step(batch, {name: lengths[name] for name in names}, {})
        for field in fields(part):
            own, wanted = getattr(part, field.name), getattr(alone, field.name)
            assert np.array_equal(np.array(own), np.array(wanted)), field.name
        assert (rows.start, rows.stop) == (end, end + len(part.token_ids))
        end = rows.stop
    assert end == len(whole.token_ids)
