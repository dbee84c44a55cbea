"""A layer that keeps a state instead of keys and values says what a plain recurrence over the whole text says: in
chunks, from cached prefixes, after preemption and rejected drafts, replayed, on several ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import STATE_WINDOW, RecurrentSpec
from quire_engine.messages import EngineCoreRequest
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.loader import load_model
from quire_engine.models.step_context import StepContext
from quire_engine.worker import model_loader
from support.checkpoints import with_windows
from support.every_kind import core_of
from support.oracle import make_prompts
from support.ranks import llm_of_thread_ranks
from torch import nn
from transformers import AutoModelForCausalLM

VOCAB_SIZE, NUM_OUTPUT_TOKENS, BLOCK_SIZE = 515, 20, 4
LAYERS = (0, 2)
"""The recurrent ones, of three."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "block_size": BLOCK_SIZE, "device": "cpu", "max_num_seqs": 4,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)


def decay_of(size: int) -> torch.Tensor:
    """How much of each feature of the state stays."""
    return torch.linspace(0.3, 0.97, size)


class Recurrent(nn.Module):
    """In the place of a decoder's attention: a decaying sum of each feature. A rank has some of the features.

    Args:
        size: of the hidden states.
        parallel: the rank.
    """

    def __init__(self, size: int, parallel: ParallelState) -> None:
        super().__init__()
        self.group, num_ranks = parallel.tensor_group, parallel.tensor_parallel_size
        width = size // num_ranks
        self.own = slice(parallel.tensor_rank * width, (parallel.tensor_rank + 1) * width)
        self.decay = decay_of(size)[self.own]
        self.spec = RecurrentSpec(((width,),))

    def forward(self, hidden_TE: torch.Tensor, states_NRF: torch.Tensor, context: StepContext) -> torch.Tensor:
        out_TE = torch.zeros_like(hidden_TE)
        size, num_rows = context.block_size, states_NRF.shape[1]
        for request, (start, end) in enumerate(pairwise(context.query_start_loc.tolist())):
            blocks, first = context.block_table[request].tolist(), int(context.positions[start])
            state = torch.zeros_like(self.decay)
            if first:
                state = states_NRF[blocks[(first - 1) // size], (first - 1) % num_rows].clone()
            for row, position in enumerate(range(first, first + end - start), start):
                state = state * self.decay + hidden_TE[row, self.own]
                out_TE[row, self.own] = states_NRF[blocks[position // size], position % num_rows] = state
        return out_TE if self.group is None else self.group.all_reduce(out_TE)


class PlainRecurrent(nn.Module):
    """The same in transformers' decoder, over a whole text."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        out, decay = torch.zeros_like(hidden_states), decay_of(hidden_states.shape[-1])
        state = torch.zeros_like(decay)
        for row, own in enumerate(hidden_states[0]):
            out[0, row] = state = state * decay + own
        return out, None


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def workload(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what the oracle says after each."""
    prompts = [*make_prompts(4, VOCAB_SIZE, max_length=60), [7, 5, 3, 9, 2] * 10]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for number in LAYERS:
        model.model.layers[number].self_attn = PlainRecurrent()
    answers = []
    for prompt in prompts:
        token_ids = list(prompt)
        for _ in range(NUM_OUTPUT_TOKENS):
            with torch.inference_mode():
                token_ids.append(int(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(token_ids[len(prompt) :])
    return prompts, answers


@pytest.fixture
def make_llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An engine of that model, with `tensor` × `pipeline` ranks."""
    from_folder = CheckpointConfig.from_folder

    def with_states(folder: Path) -> CheckpointConfig:
        config = from_folder(folder)
        windows = tuple(STATE_WINDOW if number in LAYERS else None for number in range(config.num_layers))
        return with_windows(config, windows)

    class Hybrid(Decoder):
        recordable = None  # type: ignore[assignment]

    def load(*arguments: Any, **named: Any) -> Decoder:
        model = load_model(*arguments, **named)
        model.__class__ = Hybrid
        for number, layer in model.layers.items():
            if int(number) in LAYERS:
                layer.self_attn = Recurrent(model.hidden_size, model.parallel)
        return model

    monkeypatch.setattr(CheckpointConfig, "from_folder", with_states)
    monkeypatch.setattr(model_loader, "load_model", load)

    @contextmanager
    def make(tensor: int = 1, pipeline: int = 1, **settings: Any) -> Iterator[LLM]:
        settings = {**SETTINGS, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, **settings}
        with llm_of_thread_ranks(folder, **settings) as llm:
            try:
                yield llm
            finally:
                core_of(llm).scheduler.check_integrity()

    return make


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 24, "async_scheduling": True},
        {"enable_prefix_caching": False},
        {"block_size": 16},
        {"disable_hybrid_kv_cache_manager": True},
    ],
    ids=str,
)
def test_it_says_what_the_recurrence_says(
    settings: dict[str, Any], make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, expected = workload
    assert len({tuple(one) for one in expected}) == len(prompts)
    with make_llm(**settings) as llm:
        assert generate(llm, prompts) == expected
        before = llm.get_stats().prefix_cache_hits
        assert generate(llm, prompts[::-1]) == expected[::-1]
        hits = llm.get_stats().prefix_cache_hits - before
        stats = llm.get_stats()
    size = settings.get("block_size", BLOCK_SIZE)
    full = sum((len(prompt) - 1) // size * size for prompt in prompts)
    assert (0 < hits <= full) if settings.get("enable_prefix_caching", True) else hits == 0
    assert (stats.num_blocks_used, stats.num_failed_steps) == (0, 0)


def test_a_request_keeps_its_last_state_alone(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Its other blocks are those of the layer that attends to all tokens; and a long prompt goes on from the last full
    block of a shorter one."""
    prompts, expected = workload
    prompt, answer = prompts[-1], expected[-1]
    with make_llm() as llm:
        assert generate(llm, [prompt]) == [answer]
        before = llm.get_stats().prefix_cache_hits
        assert generate(llm, [[*prompt, *answer[:12]]])[0][: NUM_OUTPUT_TOKENS - 12] == answer[12:]
        assert llm.get_stats().prefix_cache_hits - before == (len(prompt) + 12 - 1) // BLOCK_SIZE * BLOCK_SIZE
        core = core_of(llm)
        core.add_request(EngineCoreRequest("long", prompt[::-1], PARAMS))
        held = []
        while core.has_requests():
            core.step()
            held.append(core.scheduler.kv_cache.num_blocks_of("long"))
    assert max(held) <= -(-(len(prompt) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE) + 2 * (-(-len(prompt) // BLOCK_SIZE) + 1)
    assert held[-2] <= -(-(len(prompt) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE) + 2 * 2


def test_preempted(make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]) -> None:
    prompts, expected = workload
    with make_llm(kv_cache_memory_bytes=1 << 17, max_num_batched_tokens=16) as llm:
        assert generate(llm, prompts * 2) == expected * 2
        assert llm.get_stats().num_preemptions > 0


@pytest.mark.parametrize("num_drafts", [1, 3, 6])
def test_rejected_drafts_leave_no_trace(
    num_drafts: int, make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    """With more drafts than a block has tokens, too."""
    prompts, expected = workload
    with make_llm(speculative_config={"method": "ngram", "num_speculative_tokens": num_drafts}) as llm:
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts) == expected
        drafts = llm.get_stats().drafts
    assert drafts is not None
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 3)])
def test_however_it_is_cut_among_ranks(
    tensor: int, pipeline: int, make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, expected = workload
    with make_llm(tensor, pipeline, max_num_batched_tokens=32) as llm:
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts) == expected
        assert llm.get_stats().prefix_cache_hits > 0


def test_an_engine_that_replaces_another_goes_on_with_the_same_tokens(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompt, answer = workload[0][-1], workload[1][-1]
    with make_llm() as llm:
        core = core_of(llm)
        core.add_request(
            EngineCoreRequest("again", prompt, PARAMS, output_token_ids=answer[:11], is_replay=True, num_preemptions=1)
        )
        tokens: list[int] = []
        while core.has_requests():
            for output in core.step().outputs:
                tokens += output.new_token_ids
    assert tokens == answer[11:]
