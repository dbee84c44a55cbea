"""ChainDrafter drafts what its model puts next, and computes for it what it lacks, and no more."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from quire_engine.device.transfer import CPU
from quire_engine.draft_chances import DraftChances
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.drafting.chain import ChainDrafter
from quire_engine.worker.drafting.draft_sampling import DraftSampling
from support.drafting import BLOCK_SIZE, TableModel, add_request, append_tokens, make_batch
from support.scheduling import VOCAB_SIZE, draft_right

NUM_BLOCKS = 64
OFFSETS = pytest.mark.parametrize("offset", [0, 1], ids=["tokens", "next tokens"])


class Bench:
    """A drafter of a stand-in model, over requests whose blocks do not overlap.

    Args:
        offset: of the model's tokens.
        max_tokens: that are computed at once.
    """

    def __init__(self, offset: int = 0, max_tokens: int = 1000) -> None:
        self.offset = offset
        self.model = TableModel(offset)
        self.batch: InputBatch = make_batch()
        self.drafter = ChainDrafter(self.model, 1, self.batch, max_tokens, max_drafts=8)
        self.drafter.initialize_cache(NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))

    def add(self, name: str, token_ids: Sequence[int], num_more: int = 32, shared: Sequence[int] = ()) -> list[int]:
        """A request with blocks for so many tokens more, of which the first are `shared`; returns its blocks."""
        num_blocks = -(-(len(token_ids) + num_more) // BLOCK_SIZE) - len(shared)
        own, self.free = self.free[:num_blocks], self.free[num_blocks:]
        add_request(self.batch, name, token_ids, [*shared, *own], temperature=0)
        self.drafter.forget_blocks(own)
        return [*shared, *own]

    def remove(self, name: str) -> None:
        """Its blocks belong to nobody, and keep what they have."""
        self.batch.remove(name)

    def known(self, name: str) -> list[int]:
        slot = self.batch.slots[name]
        token_ids: list[int] = self.batch.token_ids[slot, : self.batch.num_known_tokens[slot]].tolist()
        return token_ids

    def append(self, name: str, token_ids: Sequence[int]) -> None:
        append_tokens(self.batch, self.batch.slots[name], token_ids)

    def draft(self, chances: DraftChances | None = None, **counts: int) -> dict[str, list[int]]:
        """So many tokens for each, or fewer if `chances` says that they are not worth it."""
        self.model.passes.clear()
        slots = np.array([self.batch.slots[name] for name in counts])
        stops = {} if chances is None else {"least_chance": 0.5, "chances": [chances] * 2}
        sampling = DraftSampling(self.batch, slots, np.array([*counts.values()]), CPU, **stops)  # type: ignore[arg-type]
        drafts = self.drafter.draft(slots, None, sampling)
        for name, own in zip(counts, drafts, strict=True):
            assert own.start == len(self.known(name))
        return {name: own.token_ids for name, own in zip(counts, drafts, strict=True)}

    def right(self, **counts: int) -> dict[str, list[int]]:
        return {name: draft_right(self.known(name)[self.offset :], count) for name, count in counts.items()}


@OFFSETS
def test_requests_get_as_many_drafts_as_are_wanted_each_from_those_before(offset: int) -> None:
    bench = Bench(offset)
    for name, length in (("a", 9), ("b", 2), ("c", 4)):
        bench.add(name, [3, length, *range(length - 2)])
    counts = {"a": 5, "b": 5, "c": 1}
    assert bench.draft(**counts) == bench.right(**counts)
    first, *others = bench.model.passes
    assert len(first) == 9 + 2 + 4 - 3 * offset, "all known tokens at once"
    assert [len(positions) for positions in others] == [2] * 4, "then those that get more; the last draft is no input"


@OFFSETS
def test_drafts_end_where_a_further_one_has_too_little_chance(offset: int) -> None:
    bench, chances = Bench(offset), DraftChances()
    for name in "ab":
        bench.add(name, [3, ord(name), 7])
    for _ in range(100):
        chances.learn(1.0, is_accepted=False)
    assert bench.draft(chances, a=5, b=3) == bench.right(a=1, b=1)
    assert len(bench.model.passes) == 1
    assert bench.draft(DraftChances(), a=5, b=3) == bench.right(a=5, b=3)


def test_tokens_that_were_accepted_are_not_computed_again() -> None:
    bench = Bench()
    bench.add("a", [5, 6, 7])
    drafts = bench.draft(a=4)["a"]
    bench.append("a", drafts)
    bench.append("a", [drafts[0]])
    assert bench.draft(a=3) == bench.right(a=3)
    assert bench.model.passes == [[6, 7], [8], [9]], "the last draft and what was sampled behind it"


@pytest.mark.parametrize("num_right", range(5))
def test_what_follows_a_rejected_draft_is_computed_again(num_right: int) -> None:
    bench = Bench()
    bench.add("a", [5, 6, 7])
    drafts = bench.draft(a=4)["a"]
    wrong = (drafts[num_right] if num_right < 4 else 0) + 1
    bench.append("a", [*drafts[:num_right], wrong % VOCAB_SIZE])
    assert bench.draft(a=2) == bench.right(a=2)
    first = 3 + min(num_right, 3)
    assert bench.model.passes[0] == list(range(first, 3 + num_right + 1))


def test_next_tokens_that_were_accepted_are_computed_again_from_what_the_target_says() -> None:
    """With an offset, the drafts' inputs are guesses of the head too, not only its tokens."""
    bench = Bench(1)
    bench.add("a", [5, 6, 7])
    drafts = bench.draft(a=4)["a"]
    bench.append("a", drafts)
    assert bench.draft(a=2) == bench.right(a=2)
    assert bench.model.passes[0] == [2, 3, 4, 5]


@OFFSETS
def test_it_makes_up_for_steps_in_which_it_was_not_asked(offset: int) -> None:
    bench = Bench(offset)
    bench.add("a", [5, 6, 7])
    bench.draft(a=4)
    bench.append("a", [VOCAB_SIZE - 1] * 10)
    assert bench.draft(a=3) == bench.right(a=3)
    assert bench.model.passes[0] == list(range(3 - offset, 13 - offset))


def test_asked_twice_for_the_same_place_it_says_the_same() -> None:
    bench = Bench()
    bench.add("a", [5, 6, 7])
    assert bench.draft(a=4) == bench.draft(a=4) == bench.right(a=4)
    assert bench.model.passes[0] == [2], "the last known token: without it there are no logits"


@OFFSETS
@pytest.mark.parametrize("max_tokens", [4, 7, 16])
def test_it_never_computes_more_at_once_than_it_may(max_tokens: int, offset: int) -> None:
    bench = Bench(offset, max_tokens)
    for name, length in (("a", 40), ("b", 3), ("c", 23), ("d", 8)):
        bench.add(name, [ord(name), *range(length - 1)], num_more=4)
    counts = {"a": 2, "b": 2, "c": 2, "d": 1}
    assert bench.draft(**counts) == bench.right(**counts)
    assert max(map(len, bench.model.passes)) <= max_tokens
    assert sum(map(len, bench.model.passes)) == 40 + 3 + 23 + 8 - 4 * offset + 3


@OFFSETS
def test_a_prefix_that_another_request_has_left_is_not_computed_again(offset: int) -> None:
    """With an offset the last input of a block is the next block's first token, which is the same here, too."""
    bench = Bench(offset)
    prompt = list(range(20, 33))
    blocks = bench.add("a", [*prompt, 2])
    bench.draft(a=3)
    bench.remove("a")
    bench.add("b", [*prompt, 9], shared=blocks[:3])
    assert bench.draft(b=3) == bench.right(b=3)
    assert bench.model.passes[0] == list(range(12, 14 - offset))


@OFFSETS
def test_a_block_that_belongs_to_other_tokens_is_computed_again(offset: int) -> None:
    bench = Bench(offset)
    blocks = bench.add("a", list(range(12)))
    bench.draft(a=3)
    bench.remove("a")
    bench.free = blocks + bench.free
    assert bench.add("b", list(range(30, 45)), num_more=8)[:3] == blocks[:3]
    assert bench.draft(b=3) == bench.right(b=3)
    assert bench.model.passes[0] == list(range(15 - offset))


def test_a_new_request_in_the_same_slot_has_none_of_the_old_ones_drafts() -> None:
    bench = Bench()
    bench.add("a", [5, 6, 7])
    drafts = bench.draft(a=4)["a"]
    slot = bench.batch.slots["a"]
    bench.remove("a")
    bench.add("b", [8, 9, 10, *drafts])
    assert bench.batch.slots["b"] == slot
    assert bench.draft(b=2) == bench.right(b=2)
    assert bench.model.passes[0] == list(range(7))


@OFFSETS
def test_new_caches_hold_nothing(offset: int) -> None:
    bench = Bench(offset)
    bench.add("a", [5, 6, 7])
    drafts = bench.draft(a=4)["a"]
    bench.drafter.initialize_cache(0)
    bench.drafter.initialize_cache(NUM_BLOCKS)
    bench.append("a", drafts)
    assert bench.draft(a=2) == bench.right(a=2)
    assert bench.model.passes[0] == list(range(7 - offset))


def test_without_blocks_nothing_is_left_of_the_caches() -> None:
    bench = Bench()
    bench.add("a", [5, 6, 7])
    bench.draft(a=4)
    (keys,) = bench.model.caches
    assert keys() is not None
    bench.drafter.initialize_cache(0)
    assert keys() is None
    assert bench.model.num_blocks == 0, "the model is told, as it may keep more than keys and values"


@OFFSETS
@pytest.mark.parametrize("seed", range(10))
def test_random_histories(seed: int, offset: int) -> None:
    """Whatever was accepted, left out, shared and taken away: the drafts are always what the model puts next."""
    random = Random(seed)
    bench = Bench(offset, max_tokens=random.choice([4, 9, 100]))
    blocks: dict[str, list[int]] = {}
    prefix = [random.randrange(VOCAB_SIZE) for _ in range(8)]
    last: dict[str, list[int]] = {}
    num_drafts = 0
    for number in range(120):
        kind = random.choice(["add", "draft", "draft", "draft", "append", "end"])
        if kind == "add" and len(blocks) < 4 and len(bench.free) >= 14:
            name = f"r{number}"
            others = [own for own in blocks.values() if offset == 0]  # what a head reads is one token further
            shared = random.choice(others)[:2] if others and random.random() < 0.5 else []
            prompt = [*prefix, *(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 8)))]
            blocks[name] = bench.add(name, prompt, num_more=36, shared=shared)
        elif kind == "end" and blocks:
            name = random.choice(sorted(blocks))
            used_by_others = {block for other, own in blocks.items() if other != name for block in own}
            bench.free += [block for block in blocks.pop(name) if block not in used_by_others]
            bench.remove(name)
            last.pop(name, None)
        else:
            room = {name: len(own) * BLOCK_SIZE - len(bench.known(name)) for name, own in blocks.items()}
            names = [name for name in sorted(blocks) if room[name] > 12]
            names = random.sample(names, random.randint(0, len(names)))
            if kind == "append":
                for name in names:
                    own = last.get(name) or [1]
                    token_ids = [*own[: random.randint(0, len(own))], random.randrange(VOCAB_SIZE)]
                    bench.append(name, token_ids)
            elif names:
                counts = {name: random.randint(1, 5) for name in names}
                counts = dict(sorted(counts.items(), key=lambda item: -item[1]))
                drafts = bench.draft(**counts)
                assert drafts == bench.right(**counts)
                last |= drafts
                num_drafts += len(counts)
    assert num_drafts > 10
