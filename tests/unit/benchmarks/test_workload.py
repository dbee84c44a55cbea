"""The workload is the same everywhere and for ever: figures of different versions compare only then."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.workload import (
    COMMON_TOKENS,
    WALK_LENGTH,
    WORKLOADS,
    copying_task,
    make_workload,
    walk_order,
)

DIGESTS = {
    "mixed": "ffb44ce1a08792d641f46d5b57cb7ef1debb70f07959ef5d08406ce35d40f696",
    "one_stream": "a7fbaf179d4d664cc1aa30d92cfeba1e9606463114de77ec2ca9f9eca946377a",
    "shared_prefix": "c42175ce92f43b2c01be2cb9b41f3012b3a61e01ef2bc7c8079a151327ff1872",
    "copying": "dd1f380881a52db741bf13f4a42f74b288dd13b8e56d71ec1a8156d1f52d4a66",
    "copying_prompt": "8b689a46afa47bdd43a1e8bb56ee36af28d34440cdd726c2f22fd238a7a374d1",
    "long_prompts": "f98d70b35f9ea50507cd52fa0efd4f996cd0b47db737b74d64f6d68b006469f6",
    "long_context": "c8a3e7b1cbb89ea2a564f210b24cb779c59f78c6725cf8ecb6c5241a79bb05d7",
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
    if workload.is_cached:
        return
    beginnings = {tuple(prompt[:4]) for prompt in workload.prompts}
    assert not beginnings & {tuple(prompt[:4]) for prompt in workload.warm_up}


def test_long_context_alone_is_cached_by_its_warm_up() -> None:
    assert [name for name in WORKLOADS if make_workload(name).is_cached] == ["long_context"]
    assert [len(prompt) for prompt in make_workload("long_context").prompts] == [3000] * 8
    assert len(make_workload("long_context", 2).prompts) == 2


def test_a_long_prompt_has_one_token_of_output() -> None:
    workload = make_workload("long_prompts")
    assert (workload.num_input_tokens, workload.output_lengths) == (4 * 2048, [1] * 4)


def test_a_file_is_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"prompts": [[5, 6]], "output_lengths": [3], "warm_up": [[7]]}))
    workload = make_workload(str(file))
    assert (workload.prompts, workload.num_output_tokens, workload.is_cached) == ([[5, 6]], 3, False)


def test_copying_prompt_is_the_prompt_of_copying() -> None:
    assert make_workload("copying_prompt").prompts == make_workload("copying").prompts
    assert make_workload("copying_prompt").output_lengths == [1]


def test_walk_visits_every_token_once() -> None:
    assert sorted(walk_order()) == list(range(2, 2 + WALK_LENGTH))


@pytest.mark.parametrize("number", [0, 1, 7])
def test_copies_are_a_walk_from_the_last_token_of_the_prompt(number: int) -> None:
    prompt, output = copying_task(number, 256, 768)
    assert (len(prompt), len(output)) == (768, 256)
    order = walk_order()
    start = order.index(output[0])
    assert [order[start - 1], *order[start : start + 256]] == [prompt[-1], *output]


def test_most_of_a_copy_is_in_its_prompt_but_not_all() -> None:
    prompt, output = copying_task(0, 256, 768)
    pairs = set(pairwise(prompt))
    found = sum(pair in pairs for pair in pairwise(output))
    assert 0.75 < found / 255 < 0.97


def test_a_task_says_nothing_of_the_next() -> None:
    tasks = [copying_task(number, 256, 768) for number in range(4)]
    for prompt, output in tasks:
        for _, other in tasks:
            if other is not output:
                assert not set(output) & set(other)
                assert not set(pairwise(prompt)) & set(pairwise(other))


def test_the_end_of_the_walk_is_told() -> None:
    assert len(copying_task(119, 256, 768)[1]) == 256
    with pytest.raises(ValueError, match="task 121 of 256 tokens is beyond the walk's 30998"):
        copying_task(121, 256, 768)
