"""How far a drafting model has come, block by block, against a plain list of positions."""

from random import Random

import numpy as np
import pytest
from quire_engine.worker.drafting.chain import DraftedPositions
from support.drafting import BLOCK_SIZE, MAX_MODEL_LEN, add_request, make_batch

NUM_BLOCKS = 40


def row(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_the_first_gap_ends_what_counts() -> None:
    batch = make_batch()
    slot = add_request(batch, "a", range(11), [7, 2, 9])
    drafted = DraftedPositions(batch, NUM_BLOCKS)
    assert drafted.counts(row(slot)).tolist() == [0]
    drafted.extend(row(slot), row(0), row(11))
    assert drafted.counts(row(slot)).tolist() == [11]
    drafted.forget([9])
    assert drafted.counts(row(slot)).tolist() == [8]
    drafted.forget([7])
    assert drafted.counts(row(slot)).tolist() == [0], "the second block is no use without the first"
    drafted.extend(row(slot), row(0), row(4))
    assert drafted.counts(row(slot)).tolist() == [8], "both are there again"


def test_a_block_that_another_request_finds_has_what_was_computed_of_it() -> None:
    batch = make_batch()
    first = add_request(batch, "a", range(11), [7, 2, 9])
    drafted = DraftedPositions(batch, NUM_BLOCKS)
    drafted.extend(row(first), row(0), row(11))
    other = add_request(batch, "b", range(20), [7, 2, 11, 12, 13])
    assert drafted.counts(row(other, first)).tolist() == [8, 11]


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int) -> None:
    """Requests come, share blocks, are computed further and end; blocks are given to others."""
    random = Random(seed)
    batch = make_batch(5)
    drafted = DraftedPositions(batch, NUM_BLOCKS)
    computed: dict[int, int] = {}  # of each block, how many of its first positions
    tables: dict[str, list[int]] = {}
    most = 0
    for number in range(150):
        kind = random.choice(["add", "extend", "extend", "append", "end"])
        if kind == "add" and len(tables) < 5:
            shared = random.choice([*tables.values(), []])
            shared = shared[: random.randint(0, len(shared))]
            used = {block for table in tables.values() for block in table}
            free = sorted(set(range(NUM_BLOCKS)) - used)
            own = random.sample(free, min(random.randint(1, 4), len(free)))
            if not shared + own:
                continue
            tables[f"r{number}"] = shared + own
            add_request(batch, f"r{number}", [1], shared + own)
            drafted.forget(own)
            computed.update(dict.fromkeys(own, 0))
        elif kind == "append" and tables:
            name = random.choice(sorted(tables))
            used = {block for table in tables.values() for block in table}
            own = sorted(set(range(NUM_BLOCKS)) - used)[: random.randint(0, 2)]
            if len(tables[name]) + len(own) > MAX_MODEL_LEN // BLOCK_SIZE:
                continue
            tables[name] += own
            batch.append_blocks(batch.slots[name], own)
            drafted.forget(own)
            computed.update(dict.fromkeys(own, 0))
        elif kind == "extend" and tables:
            names = random.sample(sorted(tables), random.randint(1, len(tables)))
            shared_by = [block for name in names for block in tables[name]]
            if len(set(shared_by)) < len(shared_by):
                names = names[:1]
            slots = [batch.slots[name] for name in names]
            starts = drafted.counts(row(*slots)).tolist()
            ends = [random.randint(start, len(tables[name]) * BLOCK_SIZE)
                    for name, start in zip(names, starts, strict=True)]  # fmt: skip
            drafted.extend(row(*slots), row(*starts), row(*ends))
            for name, start, end in zip(names, starts, ends, strict=True):
                for place in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                    computed[tables[name][place]] = min(end - place * BLOCK_SIZE, BLOCK_SIZE)
        elif kind == "end" and tables and random.random() < 0.5:
            name = random.choice(sorted(tables))
            del tables[name]
            batch.remove(name)
        if not tables:
            continue
        names = random.sample(sorted(tables), random.randint(1, len(tables)))
        expected = []
        for name in names:
            count = 0
            for block in tables[name]:
                count += computed[block]
                if computed[block] < BLOCK_SIZE:
                    break
            expected.append(count)
        assert drafted.counts(row(*(batch.slots[name] for name in names))).tolist() == expected
        most = max(most, *expected)
    assert most > 12
