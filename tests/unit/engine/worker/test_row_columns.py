"""What a model declares of each row reaches its layers, however a step is computed or drafted."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.messages import NewRequestData, SchedulerOutput
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.loader import load_model
from quire_engine.models.step_context import ContextBuilder, KVCaches, RowColumn, StepContext, StepRows
from quire_engine.worker import model_loader
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.drafting import make
from quire_engine.worker.forward.decode_graphs import DecodeGraphs, run_as_captured
from quire_engine.worker.forward.eager import EagerForward, Forward
from quire_engine.worker.forward.recorded import RecordedForward
from quire_kernels import add_residual, cpu, load_rows
from quire_kernels.gpu.interpreter import INTERPRETED
from quire_kernels.kv_cache import new_kv_cache
from support.every_kind import core_of
from support.oracle import make_prompts
from support.scheduling import draft_always
from support.triton_interpreter import interpreted_kernels

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, VOCAB_SIZE = 16, 7, 64, 515
ADAPTERS, AXES = 5, 3
PROMPTS = make_prompts(4, 500, max_length=40)
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def three_positions(positions: Any) -> Any:
    return np.stack([positions, positions // 4, positions % 7])


def with_columns(model: Decoder, columns: list[RowColumn]) -> Any:
    """Have a model add to each row a vector of its adapter, and one for each of its three positions: the same
    vectors in each model."""
    generator = torch.Generator().manual_seed(0)
    adapters = torch.randn(ADAPTERS, model.hidden_size, generator=generator)
    axes = torch.randn(AXES, MAX_MODEL_LEN + 16, model.hidden_size, generator=generator)
    run_layers = model.run_layers

    def run(
        hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, context: StepContext, kv_caches: KVCaches, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if "adapter" in context.columns:
            add_residual(load_rows(adapters, context.columns["adapter"]), hidden_TE)
        for table, positions in zip(axes, context.columns["positions of three axes"], strict=True):
            add_residual(load_rows(table, positions), hidden_TE)
        return run_layers(hidden_TE, residual_TE, context, kv_caches, *rest)

    model.run_layers, model.row_columns = run, columns  # type: ignore[method-assign]
    model.adapters, model.axes = adapters, axes  # type: ignore[assignment]
    return model


MROPE = RowColumn("positions of three axes", lambda rows, batch: three_positions(rows.positions), width=AXES)


@pytest.mark.parametrize("way", ["op by op", "recorded", "graphs"])
@torch.inference_mode()
def test_each_row_has_its_own_values(way: str, checkpoint: Callable[[str], Path]) -> None:
    """Two requests, of which each has an adapter; rows of padding have another one."""
    if way == "recorded" and cpu.library() is None:
        pytest.skip(cpu.status().reason)
    if way == "graphs" and not INTERPRETED.value:
        pytest.skip("the interpreter is off where there is a GPU; see tests/conftest.py")
    folder, adapter_of = checkpoint("qwen3"), np.array([3, 1, 2, 3])
    columns = [RowColumn("adapter", lambda rows, batch: adapter_of[rows.token_slots], fill=4), MROPE]
    with interpreted_kernels() if way == "graphs" else nullcontext():
        model = load_model(folder, CheckpointConfig.from_folder(folder), torch.float32, MAX_MODEL_LEN)
        plain = load_model(folder, CheckpointConfig.from_folder(folder), torch.float32, MAX_MODEL_LEN)
        model = with_columns(model, columns)
        batch = InputBatch(4, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE, columns=columns)
        requests = {"a": ([7 * i % 500 for i in range(21)], [4, 1]), "b": ([3, 1, 4, 1, 5], [2])}
        for name, (token_ids, blocks) in requests.items():
            batch.add(NewRequestData(name, token_ids, len(token_ids), SamplingParams(), [], blocks, 0))
        spec = model.state_specs[0]
        shape = NUM_BLOCKS, spec.num_kv_heads, BLOCK_SIZE, spec.head_size
        caches: list[KVCaches] = [
            [(new_kv_cache(*shape, torch.float32), new_kv_cache(*shape, torch.float32)) for _ in model.state_specs]
            for _ in range(2)
        ]
        eager, reference = (EagerForward(model, own, batch, None) for own in caches)
        for last_tokens in (False, True):
            forward: Forward = eager
            if way == "recorded":
                forward = RecordedForward(model, caches[0], batch, None)
            elif way == "graphs" and last_tokens:
                forward = graphs = DecodeGraphs(
                    model, caches[0], batch, torch.zeros(5, dtype=torch.int64), MAX_MODEL_LEN, lambda: run_as_captured
                )
                graphs.capture([4], lambda: 0, 1)
            scheduled = {name: 1 if last_tokens else len(tokens) - 1 for name, (tokens, _) in requests.items()}
            if last_tokens:
                for name, (token_ids, _) in requests.items():
                    batch.num_computed_tokens[batch.slots[name]] = len(token_ids) - 1
            inputs = StepInputs.of(batch, SchedulerOutput(scheduled))
            assert forward.takes(inputs)
            got = forward(inputs)
            token_ids_T, context = reference.upload(inputs)
            hidden = plain.embed(token_ids_T) + model.adapters[adapter_of[inputs.token_slots]]
            for table, positions in zip(model.axes, three_positions(inputs.positions), strict=True):
                hidden = hidden + table[positions]
            expected = plain.final_norm(*plain.run_layers(hidden, None, context, caches[1]), context)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "op by op"])
def test_an_engine_computes_and_drafts_with_them(
    is_recorded: bool,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The model drafts for itself: all its drafts are accepted if and only if it drafts with the same values."""
    folder = checkpoint("qwen3")
    if not is_recorded:
        request.addfinalizer(cpu.status.cache_clear)
        monkeypatch.setenv(cpu.KERNELS_VARIABLE, "torch")
        cpu.status.cache_clear()
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4}
    without = generate(LLM(folder, **settings), PROMPTS)

    def load(*arguments: Any, **named: Any) -> Decoder:
        model: Decoder = with_columns(load_model(*arguments, **named), [MROPE])
        return model

    monkeypatch.setattr(model_loader, "load_model", load)
    monkeypatch.setattr(make, "load_model", load)
    expected = [generate(LLM(folder, **settings), [prompt])[0] for prompt in PROMPTS]
    assert all(one != other for one, other in zip(expected, without, strict=True))
    assert generate(LLM(folder, **settings, max_num_batched_tokens=8, async_scheduling=True), PROMPTS) == expected
    llm = LLM(folder, **settings, speculative_config={"model": str(folder), "num_speculative_tokens": 4})
    draft_always(core_of(llm).scheduler, None, VOCAB_SIZE, 4)
    assert generate(llm, PROMPTS) == expected
    drafts = llm.get_stats().drafts
    assert drafts is not None
    assert 0 < drafts.num_draft_tokens == drafts.num_accepted_tokens


@pytest.mark.parametrize("slots", [[-1, -1, -1], [-1, 2, -1]])
def test_a_step_leaves_an_optional_column_out_if_no_row_has_a_value(slots: list[int]) -> None:
    adapter = RowColumn("adapter", lambda rows: np.array(slots), fill=-1, is_optional=True)
    columns = [adapter, RowColumn("position", lambda rows: rows.positions)]
    no_attention: Any = object()
    contexts = ContextBuilder(
        [no_attention], [(torch.empty(0),)], [np.zeros((1, 4), np.int64)], BLOCK_SIZE, columns=columns
    )
    tokens = np.arange(3)
    rows = StepRows(
        slots=np.zeros(1, np.int64), query_start_loc=np.array([0, 3]), seq_lens=np.array([3]), token_ids=tokens + 7,
        token_slots=np.zeros(3, np.int64), positions=tokens, slot_mappings=[tokens],
    )  # fmt: skip
    context, (token_ids,) = contexts.upload(rows, rows.token_ids)
    expected = {"position": [0, 1, 2]} | ({} if max(slots) < 0 else {"adapter": slots})
    assert {name: column.tolist() for name, column in context.columns.items()} == expected
    assert token_ids.tolist() == [7, 8, 9]
