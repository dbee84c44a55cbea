"""A slot of the persistent batch carries nothing from its last user."""

import random
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from quire_engine.messages import NewRequestData
from quire_engine.sampling import SamplingMetadata
from quire_engine.sampling.penalties import Penalties
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker.input_batch import InputBatch
from quire_engine.worker.model_runner import ModelRunner

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


def metadata(batch: InputBatch, slots: list[int]) -> SamplingMetadata:
    runner = ModelRunner(None, batch, 4)  # type: ignore[arg-type]
    return runner._sampling_metadata(np.array(slots), None)


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
        slots = [used.slots[request.request_id] for request in live]
        fresh_slots = [fresh.slots[request.request_id] for request in live]
        assert plain(metadata(used, slots)) == plain(metadata(fresh, fresh_slots))
        assert used.num_prompt_logprobs[slots[-1]] == fresh.num_prompt_logprobs[fresh_slots[-1]]
        assert used.num_blocks[slots].tolist() == fresh.num_blocks[fresh_slots].tolist()
        for request, slot in zip(live, slots, strict=True):  # tokens come, for all of them
            token_id = rng.randrange(VOCAB_SIZE)
            used.append_tokens(np.array([slot]), np.array([token_id]))
            if len(request.token_ids) < 25:
                request.token_ids.append(token_id)
            else:
                live.remove(request)
                used.remove(request.request_id)
                break


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
    columns = metadata(batch, [0, 1])
    assert (columns.penalties, columns.token_constraints, columns.all_greedy) == (None, None, True)
