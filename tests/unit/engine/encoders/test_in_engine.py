"""Requests with images in the engine: the same tokens and probabilities however they are computed."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from quire_engine import LLM, RequestOutput, SamplingParams
from quire_engine.encoders.family import find_family
from quire_engine.encoders.image_encoder import ImageEncoder
from quire_engine.errors import RequestError
from quire_engine.frontend.beam_search import BeamSearchParams
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.kv_cache.hashing import part_keys
from quire_engine.messages import PromptPart
from quire_engine.pooling import PoolingParams
from quire_engine.replicas.router import block_keys
from support.engines import Recorder, Stream, assert_same, engine, run, until
from support.engines import params as stream_params
from support.every_kind import core_of
from support.pictures import image_of
from support.ranks import llm_of_thread_ranks

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 2**22, "block_size": 4,
    "limit_mm_per_prompt": {"image": 0},
}  # fmt: skip
"""Without a tower of their own: all engines of this file share one."""
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 4
"""Keys and values of 4 tokens in 2 layers of 2 heads of 16 float32 numbers."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=2)
PARAMS = [GREEDY, SEEDED, GREEDY, GREEDY]


def with_image(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


FIRST, SECOND, THIRD = image_of(40, 90), image_of(28, 28, seed=1), image_of(28, 28, seed=2)
PROMPTS: list[Any] = [
    with_image("def f(<image>):", FIRST), with_image("# <image> and <image>\n", SECOND, FIRST), "no picture at all",
    with_image("<image>", SECOND),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(picture_checkpoint: Callable[[str], Path]) -> Path:
    return picture_checkpoint("smolvlm")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[ImageEncoder]:
    family = find_family(folder)
    assert family is not None
    encoder = ImageEncoder(folder, family, load_tokenizer(folder), "float32", "cpu", max_images=4)
    yield encoder
    encoder.shutdown()


@pytest.fixture
def llm_of(folder: Path, encoder: ImageEncoder) -> Callable[..., Any]:
    @contextmanager
    def make(**settings: Any) -> Iterator[LLM]:
        with llm_of_thread_ranks(folder, **{**SETTINGS, **settings}) as llm:
            llm._inputs.images = encoder
            try:
                yield llm
            finally:
                llm._inputs.images = None

    return make


def generate(llm: LLM, prompts: list[Any] = PROMPTS, params: Any = PARAMS) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.get_stats().num_failed_steps == 0
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_chunks_the_prefix_cache_and_preemption_change_no_bit(dtype: str, llm_of: Callable[..., Any]) -> None:
    own = {"dtype": "bfloat16", "quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
    with llm_of(**own) as llm:
        alone = [generate(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    expected = [output.outputs for output in alone]
    for budget in (1, 7, 64) if dtype == "float32" else (7, 64):
        with llm_of(**own, max_num_batched_tokens=budget, max_num_seqs=min(budget, 4)) as llm:
            assert [output.outputs for output in generate(llm)] == expected
            again = generate(llm)
            assert [output.outputs for output in again] == expected
            assert all(output.num_cached_tokens > 0 for output in again)
    prompts, long = [with_image("<image>", image) for image in (SECOND, THIRD)], replace(SEEDED, max_tokens=60)
    scarce = 100 * BLOCK_BYTES // (1 if dtype == "float32" else 2)
    with llm_of(**own) as llm:
        expected = [generate(llm, [prompt], long)[0].outputs for prompt in prompts]
    with llm_of(**own, kv_cache_memory_bytes=scarce, enable_prefix_caching=False) as llm:
        assert [output.outputs for output in generate(llm, prompts * 3, long)] == expected * 3
        assert llm.get_stats().num_preemptions > 0


def test_hits_end_before_in_and_after_an_image(llm_of: Callable[..., Any], encoder: ImageEncoder) -> None:
    """The prefix of a prompt is cached up to any block, those of an image included."""
    with llm_of() as llm:
        whole = generate(llm, [with_image("a b c d e f g <image> h i j k l m", FIRST)], GREEDY)[0]
        token_ids = whole.prompt_token_ids
        is_image = [token_id == encoder._family.image_token_id for token_id in token_ids]
        first, last = is_image.index(True), len(is_image) - 1 - is_image[::-1].index(True)
        ends = [first - 2, first, (first + last) // 2, last + 1, len(token_ids) - 1]
        request = llm._inputs.process(with_image("a b c d e f g <image> h i j k l m", FIRST), GREEDY)
        for end in ends:
            assert llm.reset_prefix_cache()
            (prefix,) = _cut(request, end)
            llm._run_all([prefix], use_tqdm=False)
            (output,) = llm._run_all([_renamed(request, f"after {end}")], use_tqdm=False)
            assert output.outputs == whole.outputs
            assert output.num_cached_tokens == end // 4 * 4
        (other,) = generate(llm, [with_image("a b c d e f g <image> h i j k l m", image_of(40, 90, seed=9))], GREEDY)
        assert len(other.prompt_token_ids) == len(token_ids)
        assert other.num_cached_tokens == first // 4 * 4, "an image of the same size shares no block"
        assert other.outputs != whole.outputs


def _renamed(request: Any, request_id: str, **changes: Any) -> Any:
    return replace(request, request_id=request_id, **changes)


def _cut(request: Any, end: int) -> list[Any]:
    """The same request with the first tokens alone."""
    parts = []
    for part in request.prompt_parts:
        length = min(part.length, end - part.start)
        if length > 0:
            tensor = part.tensor[: len(part.tensor) // part.length * length]
            parts.append(replace(part, length=length, tensor=tensor))
    return [_renamed(request, f"first {end}", prompt_token_ids=request.prompt_token_ids[:end], prompt_parts=parts)]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_of_several_ranks(tensor: int, pipeline: int, llm_of: Callable[..., Any]) -> None:
    with llm_of() as llm:
        expected = tokens_of(generate(llm))
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "max_num_batched_tokens": 32}
    with llm_of(**sizes) as llm:
        for _ in range(2):
            assert tokens_of(generate(llm)) == expected


def test_drafts_change_no_token(llm_of: Callable[..., Any], encoder: ImageEncoder) -> None:
    """Tokens of text are proposed, those of images are not, though the model may sample them."""
    text = "x = 1\ny = 2\n" * 4
    prompts = [*PROMPTS, with_image(f"{text}<image>{text}", SECOND), with_image("<image><image>", SECOND, SECOND), text]
    image_id = encoder._family.image_token_id
    params = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True, allowed_token_ids=[50, 51, image_id])
    with llm_of() as llm:
        expected = tokens_of(generate(llm, prompts, params))
    assert all(image_id in tokens for tokens in expected)
    for method in ("ngram", "suffix"):
        with llm_of(speculative_config={"method": method, "num_speculative_tokens": 3}) as llm:
            drafter, proposed = llm._core.scheduler._drafter, []
            propose = drafter._propose

            def listen(request: Any, max_tokens: int, propose: Any = propose, proposed: Any = proposed) -> Any:
                drafts = propose(request, max_tokens)
                proposed += [drafts.token_ids] if request.prompt_parts else []
                return drafts

            drafter._propose = listen
            for _ in range(2):
                assert tokens_of(generate(llm, prompts, params)) == expected
            assert any(proposed), "requests with images have drafts, or this test shows nothing"
            assert image_id not in {token_id for draft in proposed for token_id in draft}


def test_what_needs_the_ids_of_all_tokens_is_refused(llm_of: Callable[..., Any]) -> None:
    prompt = with_image("a <image>", SECOND)
    with llm_of() as llm:
        with pytest.raises(RequestError, match="prompt_logprobs is given with prompt_embeds or images"):
            generate(llm, [prompt], SamplingParams(prompt_logprobs=1))
        with pytest.raises(RequestError, match="multi_modal_data is given with a beam search"):
            llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
        with pytest.raises(RequestError, match="multi_modal_data is given with a request that is pooled"):
            llm.encode([prompt], PoolingParams(task="embed"), use_tqdm=False)
        (output,) = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.3))
        assert output.metrics is not None
        assert output.metrics.num_prompt_tokens == len(output.prompt_token_ids) > 100
        assert output.metrics.phases[0] == ("encode", 0.0)
        assert sum(output.metrics.phase_seconds.values()) == pytest.approx(output.metrics.e2e_seconds)


def test_the_placeholders_of_images_are_not_penalised(llm_of: Callable[..., Any], encoder: ImageEncoder) -> None:
    """Text of the prompt is, beside them."""
    with llm_of() as llm:
        request = llm._inputs.process(with_image("a<image>", SECOND), GREEDY)
        for token_id, is_penalised in ((encoder._family.image_token_id, False), (request.prompt_token_ids[0], True)):
            unseen = 99
            params = SamplingParams(
                temperature=0, max_tokens=1, logit_bias={token_id: 100.0, unseen: 70.0}, repetition_penalty=2.0
            )
            assert unseen not in request.prompt_token_ids
            (output,) = generate(llm, [with_image("a<image>", SECOND)], params)
            assert output.outputs[0].token_ids == [unseen if is_penalised else token_id]


def test_blocks_of_different_images_have_different_hashes() -> None:
    """10,000 random pairs of digests, some of which differ in one bit, and some of which have the same first bytes."""
    rng = Random(1)
    for number in range(10_000):
        first = rng.randbytes(32)
        second = bytearray(first[:8] + rng.randbytes(24) if number % 2 else first)
        second[rng.randrange(32)] ^= 1 << rng.randrange(8)
        start = rng.randrange(8)
        parts = [[PromptPart(start, 20, digest)] for digest in (first, bytes(second))]
        keys = [part_keys(one, 4, 8) for one in parts]
        assert keys[0] != keys[1]
        tokens = [1] * start + [2] * 20 + [3] * 4
        hashes = [block_keys(tokens, 4, None, one) for one in parts]
        assert hashes[0][: start // 4] == hashes[1][: start // 4]
        assert not set(hashes[0][start // 4 :]) & set(hashes[1][start // 4 :])


def stored_in(folder: Path) -> dict[str, Any]:
    """The setting for blocks that are kept in a folder."""
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


def test_a_new_engine_loads_blocks_of_images_that_another_has_saved(llm_of: Callable[..., Any], tmp_path: Path) -> None:
    with llm_of() as llm:
        expected = [output.outputs for output in generate(llm)]
        other = generate(llm, [with_image("<image>", THIRD)], GREEDY)[0]
    loaded = []
    for _ in range(2):
        with llm_of(kv_transfer_config=stored_in(tmp_path), max_num_batched_tokens=32) as llm:
            outputs = generate(llm)
            assert [output.outputs for output in outputs] == expected
            stats = core_of(llm).make_stats().kv_connector
            assert stats is not None
            loaded.append(stats.num_loaded_blocks)
            if len(loaded) == 2:  # as large as the second image, whose blocks are there
                assert generate(llm, [with_image("<image>", THIRD)], GREEDY)[0].outputs == other.outputs
                stats = core_of(llm).make_stats().kv_connector
                assert stats is not None
                assert stats.num_loaded_blocks == loaded[1]
    assert loaded[0] == 0
    assert loaded[1] >= sum((len(output.prompt_token_ids) - 1) // 4 for output in outputs[:3]), "images among them"


class ByEngine(Recorder):
    """Knows how many blocks each engine has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.num_loaded = [0, 0]

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        super().record(scheduler_stats, iteration_stats)
        if scheduler_stats is not None and scheduler_stats.kv_connector is not None:
            self.num_loaded[iteration_stats.engine_index] = scheduler_stats.kv_connector.num_loaded_blocks


@pytest.mark.slow
def test_prompts_with_images_are_computed_by_one_engine_and_what_follows_by_another(
    folder: Path, llm_of: Callable[..., Any], tmp_path: Path
) -> None:
    sampling = [stream_params(max_tokens=6, logprobs=1, **own) for own in ({}, {"temperature": 0.9, "seed": 5})]
    with llm_of() as llm:
        expected = [generate(llm, PROMPTS[:2], [own, own]) for own in sampling]

    async def main() -> None:
        streams = [[Stream(llm, prompt, own) for prompt in PROMPTS[:2]] for own in sampling]
        for group, outputs in zip(streams, expected, strict=True):
            for stream, output in zip(group, outputs, strict=True):
                assert_same((await stream.task).outputs, output.outputs)
        await until(lambda: recorder.num_loaded[1] > 0)

    settings = {**SETTINGS, "limit_mm_per_prompt": {"image": 2}, "disaggregation": {"prefill": 1, "decode": 1},
                "kv_transfer_config": stored_in(tmp_path)}  # fmt: skip
    with engine(folder, ByEngine(), step_seconds=0.002, **settings) as (llm, recorder):
        run(llm, main)


@pytest.mark.slow
def test_requests_go_on_when_an_engine_dies_and_replicas_share_what_is_encoded(
    folder: Path, llm_of: Callable[..., Any], fault: Callable[..., Path]
) -> None:
    sampling = stream_params(temperature=0.9, seed=5, max_tokens=6, logprobs=1)
    with llm_of() as llm:
        expected = generate(llm, PROMPTS[:1], sampling)[0]

    async def main() -> None:
        for num_tokens in (1, 3):
            file = fault(action="kill", num_output_tokens=num_tokens, once=True)
            output = await Stream(llm, PROMPTS[0], sampling).task
            assert not file.exists(), "it was killed"
            assert_same(output.outputs, expected.outputs)
        await until(lambda: recorder.num_restarts == 2)
        streams = [Stream(llm, PROMPTS[0], sampling) for _ in range(6)]
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        for output in outputs:
            assert_same(output.outputs, expected.outputs)
        counted = [stats.images for stats in recorder.iterations if stats.images is not None]
        assert sum(len(one.encode_seconds) for one in counted) == 1
        assert sum(one.num_cached for one in counted) == 7

    with engine(folder, **{**SETTINGS, "limit_mm_per_prompt": {"image": 1}}, data_parallel_size=2) as (llm, recorder):
        run(llm, main)
