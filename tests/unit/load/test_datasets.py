"""What is sent."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.workload import make_workload
from PIL import Image
from quire_load.datasets import (
    DatasetOptions,
    PromptMaker,
    SampleRequest,
    make_requests,
    with_adapters,
    with_slo_classes,
)

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model"
TALK = [{"from": "human", "value": "what does a list do?"}, {"from": "gpt", "value": "it holds values in order, def x"}]


def make(number: int = 20, seed: int = 0, prompts: PromptMaker | None = None, **options: Any) -> list[SampleRequest]:
    return make_requests(DatasetOptions(**options), prompts or PromptMaker(), number, seed)


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_mixed_is_the_benchmarks_workload() -> None:
    ours, theirs = make(400), make_workload("mixed", 400)
    for lengths, expected in (
        ([len(one.prompt) for one in ours], [len(prompt) for prompt in theirs.prompts]),
        ([one.max_tokens for one in ours], theirs.output_lengths),
    ):
        assert abs(min(lengths) - min(expected)) <= 3
        assert abs(max(lengths) - max(expected)) <= 3


def test_requests_are_the_same_for_a_seed_and_differ_otherwise() -> None:
    assert make() == make()
    assert make() != make(seed=1)
    assert len({tuple(one.prompt) for one in make()}) == 20


def test_random_lengths_vary_as_far_as_they_may() -> None:
    settings = {"dataset_name": "random", "random_input_len": 50, "random_output_len": 10, "random_prefix_len": 5}
    assert {(len(one.prompt), one.max_tokens) for one in make(**settings)} == {(55, 10)}
    varied = make(300, random_range_ratio=0.2, **settings)
    assert {len(one.prompt) for one in varied} == set(range(45, 66))
    assert {one.max_tokens for one in varied} == {8, 9, 10, 11, 12}
    assert len({tuple(one.prompt[:5]) for one in varied}) == 1


def test_prefixes_are_shared() -> None:
    requests = make(60, dataset_name="prefix_repetition", prefix_repetition_prefix_len=30,
                    prefix_repetition_suffix_len=6, prefix_repetition_num_prefixes=4)  # fmt: skip
    assert len({tuple(one.prompt[:30]) for one in requests}) == 4
    assert len({tuple(one.prompt[30:]) for one in requests}) == 60


def test_prompts_are_text_where_an_endpoint_takes_no_ids() -> None:
    (words,) = make(1, prompts=PromptMaker(as_text=True), dataset_name="random", random_input_len=9)
    assert isinstance(words.prompt, str)
    assert len(words.prompt.split()) == 9
    with_tokenizer = PromptMaker(CHECKPOINT, as_text=True)
    (text,) = make(1, prompts=with_tokenizer, dataset_name="random", random_input_len=100)
    assert isinstance(text.prompt, str)
    assert with_tokenizer.count(text.prompt) == pytest.approx(100, rel=0.3)


def test_images_are_random_and_of_the_sizes_that_are_asked_for() -> None:
    settings: dict[str, Any] = {
        "dataset_name": "random-mm", "random_input_len": 9, "random_output_len": 3,
        "random_mm_base_items_per_request": 3,
        "random_mm_bucket_config": "{(8, 24, 1): 0.75, (40, 16, 1): 0.25, (99, 99, 16): 0.0}",
    }  # fmt: skip
    text = PromptMaker(as_text=True)
    requests = make(100, prompts=text, **settings)
    assert requests == make(100, prompts=text, **settings)
    assert {(len(str(one.prompt).split()), one.max_tokens, len(one.images)) for one in requests} == {(9, 3, 3)}
    files = [file for one in requests for file in one.images]
    assert len(set(files)) == 300
    assert not set(files) & {file for one in make(9, 1, text, **settings) for file in one.images}
    sizes = [Image.open(io.BytesIO(file)).size for file in files]
    assert set(sizes) == {(24, 8), (16, 40)}
    assert sizes.count((24, 8)) == pytest.approx(225, abs=40)
    assert Image.open(io.BytesIO(files[0])).format == "JPEG"


def test_videos_have_the_frames_that_are_asked_for() -> None:
    config = "{(8, 24, 1): 0.5, (16, 8, 3): 0.5}"
    options: dict[str, Any] = {"dataset_name": "random-mm", "random_input_len": 9, "random_mm_bucket_config": config}
    media = [one.images[0] for one in make(40, prompts=PromptMaker(as_text=True), **options)]
    videos = [one for one in media if not isinstance(one, bytes)]
    assert 5 < len(videos) < 35
    frames = [frame for video in videos for frame in video]
    assert len(frames) == len(set(frames)) == 3 * len(videos)
    assert {Image.open(io.BytesIO(frame)).size for frame in frames} == {(8, 16)}
    assert {Image.open(io.BytesIO(one)).size for one in media if isinstance(one, bytes)} == {(24, 8)}


def test_images_need_a_chat() -> None:
    with pytest.raises(
        ValueError, match=r"dataset_name is 'random-mm'.* use quire bench serve with backend openai-chat"
    ):
        make(1, dataset_name="random-mm")


def test_ids_are_of_the_tokenizer_s_vocabulary() -> None:
    (request,) = make(1, prompts=PromptMaker(CHECKPOINT), dataset_name="random", random_input_len=500)
    assert 2000 < max(request.prompt) < 4096


def test_sharegpt_asks_for_as_many_tokens_as_the_answers_have(tmp_path: Path) -> None:
    path = write(tmp_path / "talks.json", [{"conversations": TALK}, {"conversations": TALK[:1]}, {"conversations": []}])
    prompts = PromptMaker(CHECKPOINT)
    (request,) = make(1, prompts=prompts, dataset_name="sharegpt", dataset_path=path)
    assert request.prompt == TALK[0]["value"]
    assert request.max_tokens == prompts.count(TALK[1]["value"])
    (request,) = make(1, dataset_name="sharegpt", dataset_path=path, sharegpt_output_len=9)
    assert request.max_tokens == 9
    with pytest.raises(ValueError, match=r"num_prompts is 2; .*talks.json holds 1 that can be sent"):
        make(2, prompts=prompts, dataset_name="sharegpt", dataset_path=path)
    with pytest.raises(ValueError, match="sharegpt_output_len and tokenizer are both not given"):
        make(1, dataset_name="sharegpt", dataset_path=path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ({}, "must be a list of conversations"),
        ([{"conversations": TALK}, {"talk": 1}], r"entry 1 is not ShareGPT's format"),
        ([{"conversations": [{"from": "human", "value": 5}]}], "entry 0 is not ShareGPT"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path / "data", content)
    with pytest.raises(ValueError, match=message):
        make(2, dataset_name="sharegpt", dataset_path=path, sharegpt_output_len=5)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset_path .*absent cannot be read"):
        make(1, dataset_name="sharegpt", dataset_path=tmp_path / "absent")
    with pytest.raises(ValueError, match=r"tokenizer is .*absent; it must be a checkpoint's folder"):
        PromptMaker(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"tokenizer .*bad.json cannot be read"):
        PromptMaker(write(tmp_path / "bad.json", "{}"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "other"}, "dataset_name is 'other'; it must be one of mixed, random"),
        ({"dataset_name": "sharegpt"}, "dataset_path is not given"),
        ({"random_range_ratio": 1.0}, "random_range_ratio is 1.0"),
        ({"random_input_len": 0}, "random_input_len is 0; it must be at least 1"),
        ({"random_mm_base_items_per_request": 0}, "random_mm_base_items_per_request is 0; it must be at least 1"),
        *(
            (
                {"random_mm_bucket_config": text},
                r"random_mm_bucket_config is .*; it must be \{\(height, width, frames\): share",
            )
            for text in (
                "",
                "[]",
                "{}",
                "{(8, 8, 1): 0}",
                "{(8, 8, 0): 1}",
                "{(8, 8, 769): 1}",
                "{(0, 8, 1): 1}",
                "{(8.5, 8, 1): 1}",
                "{(8, 65501, 1): 1}",
                "{(8, 8, 1): -1}",
                "{(8, 8, 1): 1e999}",
                "{(8, 8): 1}",
                "{8: 1}",
                "{(8, 8, 1): 'all'}",
                "{([], 8, 1): 1}",
                "make()",
            )
        ),
        ({"random_prefix_len": -1}, "random_prefix_len is -1; it must be at least 0"),
    ],
)
def test_bad_options_are_named(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetOptions(**options)


def test_classes_are_drawn_by_their_weights() -> None:
    requests = with_slo_classes(make(1000), {"chat": 3.0, "batch": 1.0}, 0)
    assert sum(one.slo_class == "chat" for one in requests) == pytest.approx(750, abs=50)
    assert {one.slo_class for one in with_slo_classes(make(), {}, 0)} == {""}
    adapters = with_adapters(requests, {"sql": 1.0, "law": 1.0}, 0)
    assert sum(one.lora_name == "sql" for one in adapters) == pytest.approx(500, abs=50)
    pairs = {(one.slo_class, one.lora_name) for one in adapters}
    assert pairs == {(slo_class, name) for slo_class in ("chat", "batch") for name in ("sql", "law")}
    assert requests[0].names == {"slo_class": requests[0].slo_class}
