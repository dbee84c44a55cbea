"""Small steps are computed by a recording, with the same result to the last bit."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, PoolingParams, SamplingParams
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.models import CheckpointConfig, step_context
from quire_engine.outputs import CompletionOutput
from quire_engine.worker import cache_allocator, cache_memory
from quire_engine.worker.forward import recorded as recorded_forward
from quire_engine.worker.forward.recorded import RecordedForward
from quire_kernels import NotRecordableError, Recording, cpu
from support.encoders import make_encoder
from support.oracle import make_prompts

TINYPY = Path(__file__).parents[4] / "model_repository" / "tinypy" / "1" / "model"
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step that a recording computed."""
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    rows: list[int] = []
    run = Recording.run
    monkeypatch.setattr(Recording, "run", lambda self, n: (rows.append(n), run(self, n)))
    return rows


def generate(llm: LLM) -> list[CompletionOutput]:
    prompts = make_prompts(6, 515, max_length=30)
    return [one.outputs[0] for one in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("name", ["tied-gqa", "untied-mha", "qwen2", "qwen3"])
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_the_same_to_the_last_bit(
    name: str,
    settings: dict[str, str],
    checkpoint: Callable[[str], Path],
    runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = generate(LLM(checkpoint(name), **settings))
    assert set(runs) >= {6}
    assert max(runs) <= recorded_forward.RECORDED_TOKENS
    runs.clear()
    monkeypatch.setattr(recorded_forward, "RECORDED_TOKENS", 0)
    op_by_op = generate(LLM(checkpoint(name), **settings))
    assert not runs
    assert [(one.token_ids, one.logprobs) for one in recorded] == [(one.token_ids, one.logprobs) for one in op_by_op]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_sampled_from_a_recording_unless_more_is_asked_for(
    temperature: float, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    sampled: list[int] = []
    sample = RecordedForward.sample
    monkeypatch.setattr(
        RecordedForward, "sample", lambda self, inputs: (sampled.append(len(inputs.slots)), sample(self, inputs))[1]
    )
    params = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=logprobs)
        for logprobs in (None, 1)
    ]
    llm, prompts = LLM(checkpoint("tied-gqa"), dtype="float32"), make_prompts(6, 515, max_length=30)
    plain, with_logprobs = (
        [one.outputs[0].token_ids for one in llm.generate(prompts, own, use_tqdm=False)] for own in params
    )
    assert plain == with_logprobs
    assert sampled == [6] * 11, "the first token comes of a step with whole prompts; log-probabilities are not recorded"


@pytest.mark.parametrize("level", [1, 2])
def test_made_anew_after_sleep(level: int, checkpoint: Callable[[str], Path], runs: list[int]) -> None:
    llm = LLM(checkpoint("tied-gqa"), dtype="float32")
    before = generate(llm)
    llm.sleep(level)
    llm.wake_up()
    runs.clear()
    assert [one.token_ids for one in generate(llm)] == [one.token_ids for one in before]
    assert runs


def test_a_model_that_cannot_be_recorded_is_computed_op_by_op(
    checkpoint: Callable[[str], Path],
    runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = generate(LLM(checkpoint("tied-gqa"), dtype="float32"))
    runs.clear()

    def record(rows: int) -> None:
        raise NotRecordableError("aten.add.Tensor cannot be recorded")

    monkeypatch.setattr(recorded_forward, "record", record)
    with caplog.at_level(logging.WARNING, RecordedForward.__module__):
        assert [one.token_ids for one in generate(LLM(checkpoint("tied-gqa"), dtype="float32"))] == [
            one.token_ids for one in expected
        ]
    assert "aten.add.Tensor cannot be recorded" in caplog.text
    assert not runs


def test_no_recording_where_attention_is_not_in_cpp(
    checkpoint: Callable[[str], Path], runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(LLM(checkpoint("tied-gqa"), dtype="float32"))
    runs.clear()
    monkeypatch.setattr(step_context, "is_tiled", lambda cache: False)
    outputs = generate(LLM(checkpoint("tied-gqa"), dtype="float32"))
    assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
    assert not runs


def test_its_memory_is_counted(
    checkpoint: Callable[[str], Path],
    runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[RecordedForward] = []
    create = RecordedForward.__init__

    def note(forward: RecordedForward, *args: Any) -> None:
        create(forward, *args)
        counted.append(forward)

    monkeypatch.setattr(RecordedForward, "__init__", note)
    monkeypatch.setattr(cache_memory, "peak_memory_growth", lambda function: (function(), 0)[1])
    with caplog.at_level(logging.INFO, cache_allocator.__name__):
        generate(LLM(checkpoint("untied-mha"), dtype="float32"))
    with_one_layer, whole = counted
    num_layers = CheckpointConfig.from_folder(checkpoint("untied-mha")).num_layers
    assert num_layers > 1
    assert 0 < whole.num_bytes < 1.2 * with_one_layer.num_bytes, "layers do not write to the same memory"
    assert f"activations at their peak: {with_one_layer.num_bytes / 2**20:.1f} MiB" in caplog.text


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_whole_prompts_of_encoders(
    settings: dict[str, str], runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_encoder(tmp_path, "bert", load_tokenizer(TINYPY), torch.float32)
    prompts, params = make_prompts(20, 515, max_length=120), PoolingParams(task="token_embed")

    def embed() -> list[torch.Tensor]:
        llm = LLM(folder, max_num_batched_tokens=512, weight_cache_dir="", **settings)
        return [output.outputs.data for output in llm.encode(prompts, params, use_tqdm=False)]

    recorded = embed()
    assert recorded_forward.RECORDED_TOKENS < max(runs) <= 512
    num_steps = len(runs)
    runs.clear()
    monkeypatch.setattr(recorded_forward, "RECORDED_PROMPT_TOKENS", 128)
    assert all(map(torch.equal, recorded, embed()))
    assert len(runs) > num_steps, "no step is computed in parts"
    assert max(runs) <= 128
    runs.clear()
    monkeypatch.setattr(recorded_forward, "RECORDED_PROMPT_TOKENS", 0)
    assert all(map(torch.equal, recorded, embed()))
    assert not runs
