"""The workload is the same everywhere and for ever: figures of different versions compare only then."""

import hashlib
import json

import pytest
from benchmarks.workload import COMMON_TOKENS, WORKLOADS, make_workload

DIGESTS = {
    "mixed": "ffb44ce1a08792d641f46d5b57cb7ef1debb70f07959ef5d08406ce35d40f696",
    "one_stream": "a7fbaf179d4d664cc1aa30d92cfeba1e9606463114de77ec2ca9f9eca946377a",
    "shared_prefix": "c42175ce92f43b2c01be2cb9b41f3012b3a61e01ef2bc7c8079a151327ff1872",
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_ids_and_lengths_never_change(name: str) -> None:
    workload = make_workload(name, 64)
    text = json.dumps([workload.prompts, workload.output_lengths, workload.warm_up])
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[name]


def test_mixed_has_the_promised_lengths() -> None:
    workload = make_workload("mixed", 64)
    assert len(workload.prompts) == len(workload.output_lengths) == 64
    assert 32 <= min(map(len, workload.prompts)) <= max(map(len, workload.prompts)) <= 255
    assert 16 <= min(workload.output_lengths) <= max(workload.output_lengths) <= 127


@pytest.mark.parametrize("num_requests", [1, 2, 8, 64])
def test_one_stream_is_the_first_prompt_of_mixed(num_requests: int) -> None:
    workload = make_workload("one_stream", num_requests)
    assert workload.prompts == make_workload("mixed", num_requests).prompts[:1]
    assert workload.output_lengths == [128]


def test_shared_prefix_shares_exactly_the_prefix() -> None:
    prompts = make_workload("shared_prefix", 64).prompts
    assert len({tuple(prompt[:COMMON_TOKENS]) for prompt in prompts}) == 1
    assert len({tuple(prompt[: COMMON_TOKENS + 2]) for prompt in prompts}) == 64


@pytest.mark.parametrize("name", WORKLOADS)
def test_warm_up_puts_nothing_into_the_prefix_cache_that_is_measured(name: str) -> None:
    workload = make_workload(name, 64)
    assert workload.warm_up
    beginnings = {tuple(prompt[:4]) for prompt in workload.prompts}
    assert not beginnings & {tuple(prompt[:4]) for prompt in workload.warm_up}
