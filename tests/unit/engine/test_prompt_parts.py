"""Prompts whose hidden states are given: the same tokens as from the ids, however they are computed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from quire_engine import LLM, RequestOutput, SamplingParams
from quire_engine.errors import RequestError
from quire_engine.frontend.beam_search import BeamSearchParams
from quire_engine.frontend.input_processor import InputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.messages import EngineCoreReady, EngineCoreRequest, PromptPart
from quire_engine.replicas.router import block_keys
from quire_engine.scheduler.validation import validate_request
from support.engines import Stream, assert_same, engine, offline, run, until
from support.engines import params as stream_params
from support.oracle import make_prompts
from support.ranks import llm_of_thread_ranks
from transformers import AutoModelForCausalLM

NAME = "untied-mha"
PROMPTS = [*make_prompts(12, 515, max_length=120), [7], [7, 8]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 160}
BLOCK_BYTES = 2 * 2 * 4 * 16 * 16 * 4
"""Keys and values of 16 tokens in 2 layers of 4 heads of 16 float32 numbers."""
SCARCE_BLOCKS = {8: 11, 512: 24}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
Embed = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def embed(checkpoint: Callable[[str], Path]) -> Callable[[str], Embed]:
    """By checkpoint, the embedding of transformers' model."""

    @cache
    def make(name: str) -> Embed:
        model = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
        table = model.get_input_embeddings()
        return torch.inference_mode()(lambda token_ids: table(torch.tensor(token_ids)))  # type: ignore[no-any-return]

    return make


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("scarce", [False, True])
def test_tokens_are_those_of_the_ids(
    budget: int, scarce: bool, checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]
) -> None:
    """Chunked, in one step, preempted, and from the prefix cache; beside requests with ids."""
    expected = tokens_of(LLM(checkpoint(NAME), **SETTINGS).generate(PROMPTS, GREEDY, use_tqdm=False))
    llm = LLM(
        checkpoint(NAME), **SETTINGS, max_num_batched_tokens=budget,
        kv_cache_memory_bytes=(SCARCE_BLOCKS[budget] if scarce else 512) * BLOCK_BYTES,
    )  # fmt: skip
    prompts = [{"prompt_embeds": embed(NAME)(prompt)} if i % 3 else prompt for i, prompt in enumerate(PROMPTS)]
    for turn in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert tokens_of(outputs) == expected
        if turn and not scarce:
            hits = [output.num_cached_tokens for output in outputs]
            assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert (llm.get_stats().num_preemptions > 0) == scarce, "the scarce cache must preempt, or this test shows nothing"
    assert [output.prompt_token_ids for output in outputs[:2]] == [PROMPTS[0], [0] * len(PROMPTS[1])]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_of_several_ranks(
    tensor: int, pipeline: int, checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]
) -> None:
    expected = tokens_of(LLM(checkpoint(NAME), **SETTINGS).generate(PROMPTS, GREEDY, use_tqdm=False))
    prompts = [{"prompt_embeds": embed(NAME)(prompt)} for prompt in PROMPTS]
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "max_num_batched_tokens": 32}
    with llm_of_thread_ranks(checkpoint(NAME), **SETTINGS, **sizes) as llm:
        for _ in range(2):
            assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    ("name", "settings"), [("gemma3", {}), ("granite", {}), ("tied-gqa", {"model_impl": "transformers"})]
)
def test_rows_are_what_the_embedding_of_transformers_returns(
    name: str, settings: dict[str, Any], checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]
) -> None:
    llm = LLM(checkpoint(name), **SETTINGS, **settings)
    scale = 3.0 if name == "granite" else 1.0  # its embedding_multiplier
    prompts = [{"prompt_embeds": scale * embed(name)(prompt)} for prompt in PROMPTS[:4]]
    assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == tokens_of(
        llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    )


def test_any_float_tensor_is_taken(checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]) -> None:
    llm, rows = LLM(checkpoint(NAME), **SETTINGS), embed(NAME)(PROMPTS[0])
    forms: list[Any] = [rows, rows[None], rows.double(), rows.numpy(), np.asfortranarray(rows.numpy())]
    outputs = llm.generate([{"prompt_embeds": form} for form in forms], GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == tokens_of(llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)) * len(forms)


def test_a_prompt_is_truncated_to_its_last_rows(
    checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]
) -> None:
    llm = LLM(checkpoint(NAME), **SETTINGS)
    prompt = max(PROMPTS, key=len)
    params = SamplingParams(temperature=0, max_tokens=8, truncate_prompt_tokens=5)
    outputs = llm.generate([{"prompt_embeds": embed(NAME)(prompt)}, prompt], params, use_tqdm=False)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 1


def test_blocks_are_shared_by_content(checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]) -> None:
    llm = LLM(checkpoint(NAME), **SETTINGS)
    prompt = list(range(3, 67))
    longer, other = [*prompt, *range(80, 100)], [*prompt[:20], 9, *prompt[21:]]

    def num_cached(prompt: Any) -> int:
        return llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert num_cached({"prompt_embeds": embed(NAME)(prompt)}) == 0
    assert num_cached({"prompt_embeds": embed(NAME)(longer)}) == 64
    assert num_cached({"prompt_embeds": embed(NAME)(other)}) == 16
    assert num_cached([0] * 64) == 0, "the placeholders are no tokens"
    assert num_cached(prompt) == 0


def test_the_router_keeps_prompts_of_other_content_apart() -> None:
    def keys(*digests: bytes) -> list[int]:
        parts = [PromptPart(4 * i, 4, digest) for i, digest in enumerate(digests)]
        return block_keys([0] * 13, 4, None, parts)

    assert keys(b"a", b"b")[:1] == keys(b"a", b"c")[:1]
    assert len({*keys(b"a", b"b"), *keys(b"a", b"c"), *keys(), *keys(b"d")}) == 3 + 2 + 3 + 3


# -- what has no token ids --------------------------------------------------------------------------------------------


def test_placeholders_are_not_penalised(checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]) -> None:
    """With ids, penalties count the prompt; rows have none, and 0, their placeholder, is as likely as ever."""
    llm = LLM(checkpoint(NAME), **SETTINGS)
    prompt = {"prompt_embeds": embed(NAME)(PROMPTS[0])}
    plain = SamplingParams(temperature=0, max_tokens=1, logit_bias={0: 1000.0})
    penalised = SamplingParams(temperature=0, max_tokens=1, logit_bias={0: 1000.0}, repetition_penalty=2.0, logprobs=1)
    outputs = llm.generate([prompt, prompt], [plain, penalised], use_tqdm=False)
    assert tokens_of(outputs) == [[0], [0]]
    assert tokens_of(llm.generate([prompt], SamplingParams(temperature=0, repetition_penalty=1.3), use_tqdm=False))


def test_nothing_is_drafted(checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(checkpoint(NAME), **SETTINGS, speculative_config=speculative)
    prompt = [5, 6, 7, 8] * 10
    for form, is_drafted in ((prompt, True), ({"prompt_embeds": embed(NAME)(prompt)}, False)):
        request = llm._inputs.process(form, GREEDY)
        llm._core.add_request(request)
        assert llm._core.scheduler.requests[request.request_id].is_drafted == is_drafted
        llm._core.abort_request(request.request_id)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("x" * 8, {}, "is str; it must be a tensor"),
        (None, {}, "is NoneType"),
        ([[0.0] * 64], {}, "is list"),
        (torch.zeros(64), {}, r"has shape \[64\]"),
        (torch.zeros(0, 64), {}, r"has shape \[0, 64\]"),
        (torch.zeros(2, 2, 64), {}, r"has shape \[2, 2, 64\]"),
        (torch.zeros(3, 63), {}, r"has shape \[3, 63\]; it must be a tensor of shape \[tokens, 64\]"),
        (torch.zeros(3, 64, dtype=torch.int64), {}, "has dtype torch.int64"),
        (np.zeros((3, 64), dtype=object), {}, "has dtype object"),
        (torch.full((3, 64), torch.nan), {}, "not finite"),
        (torch.full((3, 64), 1e300, dtype=torch.float64), {}, "not finite"),
        (torch.zeros(160, 64), {}, "has 160 rows; with max_model_len=160"),
        (torch.zeros(3, 64), {"prompt_logprobs": 1}, "prompt_logprobs is given with prompt_embeds"),
    ],
)
def test_what_cannot_be_served_is_said(
    prompt: Any, settings: dict[str, Any], message: str, checkpoint: Callable[[str], Path]
) -> None:
    ready = EngineCoreReady(
        vocab_size=515, max_model_len=160, num_kv_cache_tokens=4096, block_size=16, hidden_size=64
    )  # fmt: skip
    inputs = InputProcessor(load_tokenizer(checkpoint("tinypy")), ready)
    with pytest.raises(RequestError, match=message) as raised:
        inputs.process({"prompt_embeds": prompt}, SamplingParams(**settings))
    assert raised.value.parameter in ("prompt_embeds", *settings)
    with pytest.raises(RequestError, match="prompt_embeds alone"):
        inputs.process({"prompt_embeds": torch.zeros(3, 64), "prompt": "x"}, SamplingParams())


@pytest.mark.parametrize(
    "parts",
    [
        [PromptPart(0, 4, b"", b"0" * 31)],
        [PromptPart(2, 3, b"", b"0" * 24)],
        [PromptPart(-1, 1, b"", b"0" * 8)],
        [PromptPart(0, 0, b"", b"")],
        [PromptPart(0, 2, b"", b"0" * 16), PromptPart(1, 2, b"", b"0" * 16)],
    ],
)
def test_the_engine_core_checks_parts_itself(parts: list[PromptPart]) -> None:
    ready = EngineCoreReady(vocab_size=9, max_model_len=9, num_kv_cache_tokens=9, hidden_size=2)
    params = SamplingParams(max_tokens=1)
    good = [PromptPart(1, 3, b"", b"0" * 24)]
    validate_request(EngineCoreRequest("r", [0] * 4, params, prompt_parts=good), ready)
    with pytest.raises(RequestError, match="prompt_embeds"):
        validate_request(EngineCoreRequest("r", [0] * 4, params, prompt_parts=parts), ready)


def test_a_beam_search_takes_token_ids(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint(NAME), **SETTINGS)
    with pytest.raises(RequestError, match="prompt_embeds is given with a beam search"):
        llm.beam_search({"prompt_embeds": torch.zeros(3, 64)}, BeamSearchParams(beam_width=2, max_tokens=2))


def test_the_largest_numbers_harm_no_other_request(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint(NAME), **SETTINGS)
    expected = tokens_of(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False))
    huge = {"prompt_embeds": torch.full((20, 64), 3e38) * torch.tensor([1, -1]).repeat(32)}
    outputs = llm.generate([PROMPTS[0], huge, PROMPTS[1]], GREEDY, use_tqdm=False)
    assert tokens_of(outputs)[::2] == expected
    assert tokens_of(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)) == expected


# -- parts in general -------------------------------------------------------------------------------------------------


def test_a_part_of_another_kind_needs_no_line_of_the_engine(
    checkpoint: Callable[[str], Path], embed: Callable[[str], Embed]
) -> None:
    """A toy of an encoder: its rows stand between tokens, as those of a picture would."""
    llm = LLM(checkpoint(NAME), **SETTINGS, max_num_batched_tokens=16)
    picture = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)) * embed(NAME)([3, 4]).std()
    before, after = list(range(30, 43)), list(range(50, 60))
    part = PromptPart(len(before), len(picture), b"picture", picture.numpy().tobytes())
    request = llm._inputs.process([*before, *[0] * len(picture), *after], GREEDY)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(NAME), dtype=torch.float32).eval()
    rows = torch.cat((embed(NAME)(before), picture, embed(NAME)(after)))
    expected = model.generate(inputs_embeds=rows[None], max_new_tokens=16, do_sample=False, eos_token_id=None)
    for hits in (0, 32):
        (output,) = llm._run_all(
            [msgspec.structs.replace(request, request_id=f"{hits}", prompt_parts=[part])], use_tqdm=False
        )
        assert output.outputs[0].token_ids == expected[0].tolist()
        assert output.num_cached_tokens == hits


@pytest.mark.slow
def test_a_request_goes_on_when_its_engine_dies(
    checkpoint: Callable[[str], Path], embed: Callable[[str], Embed], fault: Callable[..., Path]
) -> None:
    prompt, params = PROMPTS[0], stream_params(temperature=0.9, seed=5, max_tokens=4, logprobs=1)
    (expected,) = offline(checkpoint(NAME), [prompt], params)

    async def main() -> None:
        for num_tokens in (1, 3):
            file = fault(action="kill", num_output_tokens=num_tokens, once=True)
            form: Any = {"prompt_embeds": embed(NAME)(prompt)}
            output = await Stream(llm, form, params).task
            assert not file.exists(), "it was killed"
            assert_same(output.outputs, expected)
        await until(lambda: recorder.num_restarts == 2)

    with engine(checkpoint(NAME)) as (llm, recorder):
        run(llm, main)
