"""The engine on the kernels of GPUs, on the GPU where there is one, else in Triton's interpreter: the tokens of
transformers, and the same tokens with CUDA graphs and steps ahead as without."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.models.linear import int8
from quire_engine.pooling import PoolingParams
from quire_engine.spec_decode import make_proposer
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.decode_graphs import DecodeGraphs
from quire_kernels import cpu
from support.encoders import VOCAB_SIZE as ENCODER_VOCAB_SIZE
from support.encoders import expected_states, make_encoder
from support.full import FULL
from support.oracle import VOCAB_SIZE, generate_greedily, make_prompts
from support.scheduling import draft_always
from support.triton_interpreter import interpreted_kernels
from transformers import LlamaForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar"),  # triton 3.6 with numpy
    pytest.mark.usefixtures("_gpu_kernels"),
]
TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
ALL = FULL or torch.cuda.is_available()
"""The interpreter takes ten seconds for each case."""
CACHE = {"kv_cache_memory_bytes": 1 << 22}
"""Of a device that other tests use, too."""


@pytest.fixture
def _gpu_kernels() -> Iterator[None]:
    from quire_kernels.gpu.interpreter import INTERPRETED

    with interpreted_kernels() if INTERPRETED.value else nullcontext():
        yield


@pytest.mark.parametrize("name", ["odd-sizes", *(["llama3-rope"] if ALL else [])])
def test_greedy_tokens_are_those_of_transformers(name: str, checkpoint: Callable[[str], Path]) -> None:
    """In chunks and in a batch whose sequences come and go: of three, their step is one for four."""
    folder, prompts, num_tokens = checkpoint(name), make_prompts(4, VOCAB_SIZE, max_length=40), [3, 1, 4, 2]
    settings = {"max_num_seqs": 5, "max_model_len": 64, "max_num_batched_tokens": 24, "enable_prefix_caching": False}
    llm = LLM(folder, dtype="float32", **settings, **CACHE)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in num_tokens]
    outputs = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [generate_greedily(model, *one).token_ids for one in zip(prompts, num_tokens, strict=True)]
    assert outputs == expected


@pytest.mark.parametrize("name", ["modernbert-biases", *(["gemma3_text"] if ALL else [])])
def test_hidden_states_of_encoders_are_those_of_transformers(
    name: str, made: Callable[[str, Callable[[Path], object]], Path]
) -> None:
    """LayerNorm and RMSNorm, biases, attention to both sides, in windows too."""
    folder = made(f"encoder-{name}", lambda path: make_encoder(path, name, load_tokenizer(TINYPY), torch.float32))
    prompts = make_prompts(2, ENCODER_VOCAB_SIZE, max_length=70 if torch.cuda.is_available() else 24)
    llm = LLM(folder, dtype="float32", max_num_seqs=3, max_model_len=72, max_num_batched_tokens=144, **CACHE)
    params = PoolingParams(task="token_embed", normalize=False)
    outputs = [one.outputs.data for one in llm.encode(prompts, params, use_tqdm=False)]
    for out, expected in zip(outputs, expected_states(folder, prompts), strict=True):
        cosine = torch.nn.functional.cosine_similarity(torch.as_tensor(out).double(), expected.double(), dim=-1)
        assert cosine.min() >= 0.99999


PARAMETERS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=2.0, top_k=20, seed=2, max_tokens=2, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, min_p=0.05, seed=3, max_tokens=4, repetition_penalty=1.5, min_tokens=2),
]


SETTINGS: list[dict[str, Any]] = [
    *([{}] if ALL else []),
    {"async_scheduling": True},
    {"enforce_eager": True, "quantization": "fp8", "kv_cache_dtype": "fp8"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_seeded_tokens_are_those_of_the_other_kernels(
    settings: dict[str, Any], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rows are plain, where one wants more than a graph has, ahead of the results, and in fp8 op by op."""
    if "kv_cache_dtype" in settings and torch.cuda.is_available():
        pytest.skip("tensor cores add fp8 products up with few bits")
    folder, prompts = checkpoint("tied-gqa"), make_prompts(3, VOCAB_SIZE, max_length=10)
    settings = {
        "max_num_seqs": 5, "max_model_len": 32, "max_num_batched_tokens": 32, "quantization": "int8", **settings,
        **CACHE,
    }  # fmt: skip
    outputs = []
    monkeypatch.setattr(int8, "uses_triton", lambda tensor: True)  # the others quantise the head, too
    for kernels, device in ((None, "auto"), ("torch", "cpu")):
        if kernels:
            monkeypatch.setenv(cpu.KERNELS_VARIABLE, kernels)
            cpu.status.cache_clear()
        llm = LLM(folder, dtype="float32", device=device, **settings)
        outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, PARAMETERS, use_tqdm=False)])
    assert outputs[0] == outputs[1]


def test_graphs_and_steps_ahead_change_no_token_in_bf16(checkpoint: Callable[[str], Path]) -> None:
    """Of as many requests as a graph has, whose products have the shapes that they have without."""
    folder, prompts = checkpoint("llama3-rope"), make_prompts(2, VOCAB_SIZE, max_length=10)
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=4, ignore_eos=True, logprobs=0),
    ]
    token_ids, logprobs = [], []
    for enforce_eager, ahead in ((True, False), (False, False), (False, True)):
        llm = LLM(
            folder, dtype="bfloat16", enforce_eager=enforce_eager, async_scheduling=ahead, max_num_seqs=2,
            max_model_len=32, max_num_batched_tokens=32, **CACHE,
        )  # fmt: skip
        executor = llm._core.executor  # type: ignore[attr-defined]
        assert (executor._worker.runner.graphs is None) == enforce_eager
        assert executor.async_scheduling == ahead
        completions = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
        llm.shutdown()
        token_ids.append([one.token_ids for one in completions])
        logprobs.append([one.cumulative_logprob for one in completions])
    assert token_ids[0] == token_ids[1] == token_ids[2]
    assert [len(tokens) for tokens in token_ids[0]] == [4, 4]
    assert logprobs[1] == logprobs[2] == pytest.approx(logprobs[0], abs=0.05)


def test_steps_with_drafts_are_graphs_too_and_change_no_token(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = checkpoint("tied-gqa"), [[5, 6, 7, 8] * 3, [9, 4] * 4]
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True, repetition_penalty=1.2),
    ]
    settings = {"max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 32, **CACHE}
    outputs, rows = [], []
    replay = DecodeGraphs.__call__

    def note(graphs: DecodeGraphs, inputs: StepInputs) -> torch.Tensor:
        rows.append(len(inputs.token_ids) - len(inputs.slots))
        return replay(graphs, inputs)

    monkeypatch.setattr(DecodeGraphs, "__call__", note)
    for config in (
        None,
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3},
    ):
        llm = LLM(folder, dtype="float32", speculative_config=config, **settings)
        core = llm._core  # type: ignore[attr-defined]
        if config is not None:
            draft_always(core.scheduler, make_proposer(core.scheduler.config.speculative_config), VOCAB_SIZE, 3)
            rows.clear()
        outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
        assert core.executor._worker.runner.graphs.max_size == (2 if config is None else 8)
        llm.shutdown()
    assert outputs[0] == outputs[1]
    assert any(rows), "drafts were among the rows"
