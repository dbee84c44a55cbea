"""How much of the memory the KV cache gets, and what is said when that is nothing."""

from pathlib import Path

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.memory import resident_memory_bytes
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput
from quire_engine.models import CheckpointConfig
from quire_engine.worker.model_runner import ModelRunner

TINYPY = Path(__file__).resolve().parents[4] / "model_repository" / "tinypy" / "1" / "model"


def test_too_small_a_share_of_the_memory_names_the_setting_that_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"^gpu_memory_utilization is 1e-07: .* raise it, or set kv_cache_memory_bytes"
    ):
        LLM(str(TINYPY), max_model_len=64, max_num_batched_tokens=64, gpu_memory_utilization=1e-7)


def test_a_cache_that_nobody_has_used_is_no_memory() -> None:
    size = 512 << 20
    before = resident_memory_bytes()
    llm = LLM(TINYPY, kv_cache_memory_bytes=size, max_num_seqs=4)
    assert resident_memory_bytes() - before < size / 2
    llm.generate("def f(", SamplingParams(max_tokens=2), use_tqdm=False)
    assert resident_memory_bytes() - before < size / 2


def test_memory_of_a_step_is_measured_on_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    num_layers = []
    execute_model = ModelRunner.execute_model

    def execute(runner: ModelRunner, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        num_layers.append((len(runner.model.layers), len(runner.kv_caches)))
        return execute_model(runner, scheduler_output)

    monkeypatch.setattr(ModelRunner, "execute_model", execute)
    llm = LLM(TINYPY, max_num_seqs=4)
    assert num_layers == [(1, 1)]
    llm.generate("def f(", SamplingParams(max_tokens=1), use_tqdm=False)
    layers = CheckpointConfig.from_folder(TINYPY).num_layers
    assert layers > 1
    assert num_layers[1:] == [(layers, layers)]
