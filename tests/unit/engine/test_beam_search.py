"""Beam search finds what transformers finds, with the same scores."""

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, BeamSearchParams
from quire_engine.errors import RequestError
from quire_engine.frontend.beam_search import BeamSearchSequence
from support.full import pairs
from support.oracle import make_prompts
from transformers import LlamaForCausalLM

MAX_TOKENS = 10
EOS = list(range(1, 130))
"""A quarter of the vocabulary ends a sequence, so that beams end all the time, at every length."""


def with_eos(folder: Path, target: Path, eos_token_ids: list[int]) -> Path:
    """The checkpoint with other end-of-sequence tokens."""
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_ids}))
    return target


def search_with_transformers(
    model: LlamaForCausalLM, prompt: list[int], params: BeamSearchParams, eos_token_ids: list[int]
) -> list[tuple[list[int], float]]:
    """The sequences after the prompt and their scores, the best first."""
    output: Any = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        num_beams=params.beam_width, num_return_sequences=params.beam_width, max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty, early_stopping=params.early_stopping, pad_token_id=0,
        eos_token_id=None if params.ignore_eos else eos_token_ids, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found = []
    for tokens, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        tokens = tokens[len(prompt) :]
        ends = [] if params.ignore_eos else [i for i, token_id in enumerate(tokens) if token_id in eos_token_ids]
        found.append((tokens[: ends[0] + 1] if ends else tokens[: params.max_tokens], score))
    return found


def compare(sequences: list[BeamSearchSequence], prompt: list[int], want: list[tuple[list[int], float]]) -> None:
    assert [sequence.tokens for sequence in sequences] == [prompt + tokens for tokens, _ in want]
    assert [sequence.score for sequence in sequences] == pytest.approx([score for _, score in want], abs=1e-4)


@pytest.fixture(scope="module", params=["tied-gqa", "odd-sizes"])
def sides(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[LLM, LlamaForCausalLM]:
    """This engine and transformers, on the same checkpoint with many end-of-sequence tokens."""
    folder = with_eos(checkpoint(request.param), tmp_path_factory.mktemp("beams") / "model", EOS)
    model = LlamaForCausalLM.from_pretrained(checkpoint(request.param), dtype=torch.float32).eval()
    return LLM(folder, dtype="float32", max_model_len=256), model


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "ignore_eos"),
    pairs(product([False, True, "never"], [1.0, 0.0, -0.7, 2.0], [False, True])),
)
def test_same_sequences_and_scores_as_transformers(
    ignore_eos: bool, length_penalty: float, early_stopping: Any, sides: tuple[LLM, LlamaForCausalLM]
) -> None:
    llm, model = sides
    prompts = make_prompts(4, 515, max_length=40, seed=3)
    params = BeamSearchParams(
        beam_width=3,
        max_tokens=MAX_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        ignore_eos=ignore_eos,
    )
    outputs = llm.beam_search(prompts, params)  # all prompts side by side
    reasons = set()
    for prompt, output in zip(prompts, outputs, strict=True):
        compare(output.sequences, prompt, search_with_transformers(model, prompt, params, EOS))
        reasons |= {sequence.finish_reason for sequence in output.sequences}
    assert ("stop" in reasons) is not ignore_eos
    assert llm.get_stats().num_blocks_used == 0


def test_wide_beams_need_more_logprobs_than_clients_may_ask_for(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("tied-gqa")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, dtype="float32", max_model_len=128, max_num_seqs=8)
    params = BeamSearchParams(beam_width=24, max_tokens=5)
    prompt = [7, 8, 9]
    compare(
        llm.beam_search([prompt], params)[0].sequences, prompt, search_with_transformers(model, prompt, params, [1])
    )


def test_one_beam_is_greedy_decoding(checkpoint: Callable[[str], Path]) -> None:
    from quire_engine import SamplingParams

    llm = LLM(checkpoint("tied-gqa"), dtype="float32", max_model_len=128)
    greedy = llm.generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=12, logprobs=1), use_tqdm=False)[
        0
    ].outputs[0]
    (best,) = llm.beam_search([[7, 8, 9]], BeamSearchParams(beam_width=1, max_tokens=12))[0].sequences
    assert best.tokens == [7, 8, 9, *greedy.token_ids]
    assert best.cum_logprob == pytest.approx(greedy.cumulative_logprob)
    assert best.text == llm._inputs.decode(best.tokens)
    assert len(best.logprobs) == len(greedy.token_ids)


def test_the_context_ends_a_search(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint("tied-gqa"), dtype="float32", max_model_len=32)
    outputs = llm.beam_search([[5] * 28], BeamSearchParams(beam_width=2, max_tokens=30, ignore_eos=True))
    assert [len(sequence.tokens) for sequence in outputs[0].sequences] == [32, 32]


def test_prefix_cache_serves_the_beams(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint("tied-gqa"), dtype="float32", max_model_len=256)
    llm.beam_search([[5 + i for i in range(160)]], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    stats = llm.get_stats()
    assert stats.prefix_cache_hits / stats.prefix_cache_queries > 0.85


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 10_000}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_bad_parameters_are_named(values: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is "):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **values})
