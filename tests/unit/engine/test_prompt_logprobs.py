"""Log-probabilities of the prompt: those of transformers, however the prompt is cut, shared or begun again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.frontend.input_processor import InputProcessor
from quire_engine.frontend.output_processor import OutputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreReady, PromptLogprobs
from quire_engine.outputs import RequestOutput
from quire_engine.sampling import logprobs as module
from support.oracle import make_prompts
from transformers import LlamaForCausalLM

NAME = "untied-mha"
BLOCK_BYTES = 2 * 2 * 4 * 16 * 16 * 4
"""Keys and values of 16 tokens in 2 layers of 4 heads of 16 float32 numbers."""
SCARCE_BLOCKS = {8: 11, 64: 30, 512: 30}
"""KV blocks, by token budget, with which requests that run together cannot all keep theirs."""
PROMPTS = [*make_prompts(12, 515, max_length=120), [7], [7, 8]]
NUM_TOKENS = 12


def params(i: int, **settings: Any) -> SamplingParams:
    """Every number from 0 to 5, and every seventh request that does not ask."""
    number = None if i % 7 == 6 else i % 6
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=number, **settings)


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> list[torch.Tensor]:
    """Per prompt, log-probabilities [T, V] of the token after each position."""
    model = LlamaForCausalLM.from_pretrained(checkpoint(NAME), dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in PROMPTS]


def check(output: RequestOutput, number: int | None, want_TV: torch.Tensor, llm: LLM) -> None:
    if number is None:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for token_id, entry, want in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], want_TV[:-1], strict=True
    ):
        assert entry is not None
        assert next(iter(entry)) == token_id
        most_likely = sorted((one.rank, one.logprob) for one in entry.values() if one.rank <= number)
        assert [rank for rank, _ in most_likely] == [*range(1, number + 1)]
        assert [logprob for _, logprob in most_likely] == pytest.approx(want.topk(number).values.tolist(), abs=1e-4)
        assert len(entry) == number + (entry[token_id].rank > number)
        for i, one in entry.items():
            assert one.logprob == pytest.approx(float(want[i]), abs=1e-4)
            # Two tokens that are equally likely but for rounding may have changed places.
            assert (want > want[i] + 2e-4).sum() < one.rank <= (want > want[i] - 2e-4).sum()
            assert one.decoded_token == llm._inputs.tokenizer.decode([i])


@pytest.mark.parametrize(
    ("budget", "scarce", "chunk_logits"),
    [
        *((budget, scarce, module.CHUNK_LOGITS) for budget, scarce in ((8, False), (64, True), (512, True))),
        # Logits of three positions at a time: of a step with few prompt tokens, and of one with many.
        (8, True, 515 * 3),
        (512, False, 515 * 3),
    ],
)
def test_prompt_logprobs_are_those_of_transformers(
    budget: int, scarce: bool, chunk_logits: int, checkpoint: Callable[[str], Path], expected: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "CHUNK_LOGITS", chunk_logits)
    llm = LLM(
        checkpoint(NAME), dtype="float32", max_model_len=160, max_num_batched_tokens=budget,
        kv_cache_memory_bytes=(SCARCE_BLOCKS[budget] if scarce else 512) * BLOCK_BYTES,
    )  # fmt: skip
    for _ in range(2):  # the second time, every prompt is in the prefix cache
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        for i, (output, want) in enumerate(zip(outputs, expected, strict=True)):
            check(output, params(i).prompt_logprobs, want, llm)
            if params(i).prompt_logprobs is not None and output.metrics and not output.metrics.num_preemptions:
                assert output.num_cached_tokens == 0, "a prompt that is not computed has no log-probabilities"
    stats = llm.get_stats()
    assert (stats.num_preemptions > 0) == scarce, "the scarce cache must preempt, or this test shows nothing"
    assert stats.num_blocks_used == 0


def test_asking_changes_no_token(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint(NAME), dtype="float32", max_model_len=160)
    plain = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    without = llm.generate(PROMPTS, plain, use_tqdm=False)
    asked = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in asked] == [o.outputs[0].token_ids for o in without]


def test_a_stream_has_them_in_its_first_delta(checkpoint: Callable[[str], Path], expected: list[torch.Tensor]) -> None:
    llm = LLM(checkpoint(NAME), dtype="float32", max_model_len=160, max_num_batched_tokens=8)
    first, *others = llm.stream(PROMPTS[0], params(3))
    check(first, 3, expected[0], llm)
    assert [delta.prompt_logprobs for delta in others] == [None] * (NUM_TOKENS - 1)


def test_a_request_after_them_is_left_alone(checkpoint: Callable[[str], Path]) -> None:
    """One slot: the second request takes that of the first."""
    llm = LLM(checkpoint(NAME), dtype="float32", max_model_len=160, max_num_seqs=1)
    outputs = llm.generate(PROMPTS[:3], [params(1), params(6), params(2)], use_tqdm=False)
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, False]


def test_of_n_sequences_the_first_one_brings_them(
    checkpoint: Callable[[str], Path], expected: list[torch.Tensor]
) -> None:
    llm = LLM(checkpoint(NAME), dtype="float32", max_model_len=160)
    sampled = SamplingParams(n=3, seed=1, temperature=0.8, max_tokens=4, ignore_eos=True, prompt_logprobs=3)
    check(llm.generate(PROMPTS[:1], sampled, use_tqdm=False)[0], 3, expected[0], llm)
    with_them = [delta for delta in llm.stream(PROMPTS[0], sampled) if delta.prompt_logprobs is not None]
    assert [[completion.index for completion in delta.outputs] for delta in with_them] == [[0]]


def test_each_position_is_unpacked_when_it_is_read(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a million entries at once would take the event loop most of a second, in which no stream gets a token."""
    tokenizer = load_tokenizer(checkpoint("tinypy"))
    ready = EngineCoreReady(vocab_size=4096, max_model_len=4096, num_kv_cache_tokens=4096)
    inputs, outputs = InputProcessor(tokenizer, ready), OutputProcessor(tokenizer)
    made, make = [], outputs._logprobs._logprob
    monkeypatch.setattr(outputs._logprobs, "_logprob", lambda *entry: (made.append(entry), make(*entry))[1])

    def packed(start: int, *ranks: int) -> PromptLogprobs:
        token_ids = np.array([[50 + start + i, 7] for i in range(len(ranks))], np.int32)
        return PromptLogprobs(
            start,
            1,
            token_ids.tobytes(),
            (-token_ids).astype(np.float32).tobytes(),
            np.array(ranks, np.int32).tobytes(),
        )

    got: list[RequestOutput] = []
    outputs.add_request(inputs.process([50, 51, 52, 53], SamplingParams(prompt_logprobs=1), "x"), got.append)
    outputs.process(EngineCoreOutputs([EngineCoreOutput("x", [9], prompt_logprobs=[packed(1, 5, 1), packed(3, 2)])]))
    positions = got[0].prompt_logprobs
    assert positions is not None
    assert (len(positions), made) == (4, [])
    last = positions[-1]
    assert last is not None
    assert {token_id: (item.logprob, item.rank) for token_id, item in last.items()} == {53: (-53.0, 2), 7: (-7.0, 1)}
    assert len(made) == 2
    assert [position and next(iter(position)) for position in positions] == [None, 51, 52, 53]
    assert (positions[1:3], positions[:]) == ([positions[1], positions[2]], positions)
    with pytest.raises(IndexError):
        positions[4]
