"""A slot of the persistent batch carries nothing from its last user."""

import random
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from quire_engine.device.transfer import CPU
from quire_engine.messages import NewRequestData, SchedulerOutput
from quire_engine.sampling import SamplingMetadata
from quire_engine.sampling.penalties import Penalties
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.sampling_inputs import sampling_metadata
from quire_engine.worker.batch.step_inputs import StepInputs

VOCAB_SIZE = 40
numbers = count()


def random_request(rng: random.Random) -> NewRequestData:
    """Each parameter is set now and then, so that most requests use some and lack others."""

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    def ids(number: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(number)]

    params = SamplingParams(
        temperature=maybe(0.7, 0.0), top_p=maybe(0.5, 1.0), top_k=maybe(3, 0), min_p=maybe(0.1, 0.0),
        seed=maybe(rng.randrange(2**64), None), logprobs=maybe(2, None), min_tokens=maybe(9, 0),
        presence_penalty=maybe(1.0, 0.0), frequency_penalty=maybe(0.5, 0.0), repetition_penalty=maybe(1.5, 1.0),
        logit_bias=maybe(dict.fromkeys(ids(4), 2.0), None), allowed_token_ids=maybe(ids(9), None),
        bad_words_token_ids=maybe([ids(2) for _ in range(60)], []), prompt_logprobs=maybe(1, None),
    )  # fmt: skip
    num_prompt_tokens, num_output_tokens = rng.randint(1, 12), rng.randint(0, 6)
    return NewRequestData(
        request_id=f"r{next(numbers)}",
        token_ids=ids(num_prompt_tokens + num_output_tokens),
        num_prompt_tokens=num_prompt_tokens,
        sampling_params=params,
        stop_token_ids=ids(2),
        block_ids=[rng.randrange(50) for _ in range(rng.randint(1, 3))],
        num_computed_tokens=0,
    )


def plain(value: Any) -> Any:
    """Something that can be compared with ==."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Penalties):  # in whatever order the tokens came
        return sorted(zip(*(getattr(value, item.name).tolist() for item in fields(value)), strict=True))
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    return value


def metadata(batch: InputBatch, request_ids: list[str], drafts: dict[str, list[int]] | None = None) -> SamplingMetadata:
    """Of a step that computes the last token of each request, and its drafts."""
    drafts = drafts or {}
    for request_id, token_ids in drafts.items():
        batch.place_drafts(request_id, token_ids)
    for slot in batch.slots.values():
        batch.num_computed_tokens[slot] = batch.num_tokens[slot] - 1
    scheduled = {request_id: 1 + len(drafts.get(request_id, ())) for request_id in request_ids}
    inputs = StepInputs.of(batch, SchedulerOutput(scheduled, draft_token_ids=drafts))
    return sampling_metadata(batch, inputs.sampled, None, CPU)


def test_a_used_slot_is_like_a_fresh_one() -> None:
    rng = random.Random(0)
    used = InputBatch(3, 30, 4, VOCAB_SIZE)
    live: list[NewRequestData] = []
    for _ in range(200):
        if len(live) == 3:
            used.remove(live.pop(rng.randrange(3)).request_id)
        live.append(random_request(rng))
        used.add(live[-1])
        fresh = InputBatch(3, 30, 4, VOCAB_SIZE)
        for request in live:
            fresh.add(request)
        request_ids = [request.request_id for request in live]
        slots = [used.slots[request_id] for request_id in request_ids]
        fresh_slots = [fresh.slots[request_id] for request_id in request_ids]
        assert plain(metadata(used, request_ids)) == plain(metadata(fresh, request_ids))
        assert used.num_prompt_logprobs[slots[-1]] == fresh.num_prompt_logprobs[fresh_slots[-1]]
        assert used.num_blocks[slots].tolist() == fresh.num_blocks[fresh_slots].tolist()
        for request, slot in zip(live, slots, strict=True):  # tokens come, for all of them
            token_id = rng.randrange(VOCAB_SIZE)
            used.settle_lists(np.array([slot]), used.num_tokens[[slot]], [[token_id]])
            if len(request.token_ids) < 25:
                request.token_ids.append(token_id)
            else:
                live.remove(request)
                used.remove(request.request_id)
                break


def test_a_row_behind_drafts_is_that_of_a_request_which_has_them() -> None:
    rng = random.Random(1)
    for _ in range(100):
        requests = [random_request(rng) for _ in range(3)]
        drafts = {
            request.request_id: [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 4))]
            for request in requests[:2]
        }
        batch = InputBatch(3, 30, 4, VOCAB_SIZE)
        twins = InputBatch(13, 30, 4, VOCAB_SIZE)
        twin_ids: list[str] = []
        for request in requests:
            batch.add(request)
            own = drafts.get(request.request_id, [])
            for number in range(len(own) + 1):
                twin_ids.append(f"{request.request_id} and {number} drafts")
                twin = replace(request, request_id=twin_ids[-1], token_ids=[*request.token_ids, *own[:number]])
                twins.add(twin)
        rows = metadata(batch, [request.request_id for request in requests], drafts)
        assert plain(rows) == plain(metadata(twins, twin_ids))


def test_prompt_logprobs_are_given_once() -> None:
    batch = InputBatch(2, 30, 4, VOCAB_SIZE)
    for name, token_ids in (("new", [1, 2, 3]), ("back", [1, 2, 3, 4])):
        batch.add(NewRequestData(name, token_ids, 3, SamplingParams(prompt_logprobs=5), [], [0], 0))
    assert batch.num_prompt_logprobs[batch.slots["new"]] == 5
    assert batch.num_prompt_logprobs[batch.slots["back"]] == -1


def test_requests_that_use_nothing_cost_nothing() -> None:
    batch = InputBatch(2, 30, 4, VOCAB_SIZE)
    for name in ("a", "b"):
        batch.add(NewRequestData(name, [1, 2, 3], 3, SamplingParams(temperature=0), [], [0], 0))
    columns = metadata(batch, ["a", "b"])
    assert (columns.penalties, columns.token_constraints, columns.all_greedy) == (None, None, True)
