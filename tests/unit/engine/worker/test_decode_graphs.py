"""Which steps are captured, and in which memory. That they compute the right thing is for the engine's tests."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import STATE
from quire_engine.messages import NewRequestData, SchedulerOutput
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.step_context import ADAPTER
from quire_engine.worker import model_loader
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.decode_graphs import (
    COLUMN_STEP,
    DecodeGraphs,
    DeviceBlockTable,
    _Graph,
    capture_sizes,
    run_as_captured,
)
from quire_engine.worker.forward.eager import EagerForward
from quire_kernels.gpu.interpreter import INTERPRETED
from support.ranks import run_on_ranks, thread_ranks
from support.recurrent import install
from support.triton_interpreter import interpreted_kernels

MEGABYTE = 1 << 20
VOCAB_SIZE = 515


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 9, 64, 255, 256, 300, 4096])
def test_a_step_wastes_few_rows(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs, "every step has a graph"
    for number in range(1, max_num_seqs + 1):
        size = min(size for size in sizes if size >= number)
        assert size - number < max(number, 8, 0 if number < 256 else 16)
        assert number < 8 or size - number < 16


class FakeCapture:
    """Its graphs share memory, into which torch captures no more once all of them are gone."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()
        self._is_used = False

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        assert self._graphs or not self._is_used

        def graph() -> None: ...

        self._graphs.add(graph)
        self._is_used = True
        return graph


class FakeGraphs(DecodeGraphs):
    """Each graph takes a megabyte, and one for each of its requests, as far as a larger one has not taken it before."""

    def __init__(self, parallel: ParallelState = ParallelState()) -> None:
        super().__init__(
            SimpleNamespace(parallel=parallel), [], InputBatch(1, 1, 1, 1), torch.zeros(2, dtype=torch.int64), 1,
            FakeCapture,
        )  # type: ignore[arg-type]  # fmt: skip
        self.attempts: list[int] = []

    def used_bytes(self) -> int:
        return (5 + len(self._graphs) + max(self._graphs, default=0)) * MEGABYTE

    def _allocate(self, max_size: int) -> None:
        assert not self._graphs, "what was captured before is let go of"
        self.allocated = max_size

    def _capture_one(self, size: int) -> _Graph:
        assert size <= self.allocated, "the largest comes first: the others find room in its memory"
        self.attempts.append(size)
        return _Graph(self._capture(lambda: None), None)


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (23, [1, 2, 4, 8, 16, 17]), (22, [2, 4, 8, 16, 17]), (19, [16, 17]), (18, [17]), (17, [16]),
        (12, [1, 2, 4, 8]), (2, [1]), (1, []), (0, []),
    ],
)  # fmt: skip
def test_graphs_keep_to_their_memory(budget: int, sizes: list[int]) -> None:
    """Sizes are left out one at a time."""
    graphs = FakeGraphs()
    graphs.capture([1, 2, 4, 8, 16, 17], graphs.used_bytes, budget * MEGABYTE)
    assert graphs.used_bytes() <= (5 + budget) * MEGABYTE
    assert sorted(graphs._graphs) == graphs._sizes == sizes
    assert graphs.max_size == max(sizes, default=0)
    assert sorted(graphs.attempts) == [1, 2, 4, 8, 16, 17], "each is tried once"


def test_a_thousand_requests_have_graphs_of_all_sizes_but_the_finest(caplog: pytest.LogCaptureFixture) -> None:
    graphs, wanted = FakeGraphs(), capture_sizes(1024)
    with caplog.at_level("WARNING"):
        graphs.capture(wanted, graphs.used_bytes, (1024 + 40) * MEGABYTE)
    assert len(graphs._sizes) == 40
    assert graphs.max_size == 1024
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896} <= set(graphs._sizes)
    assert all(b <= 2 * a for a, b in zip(graphs._sizes, graphs._sizes[1:], strict=False))
    left_out = ", ".join(str(size) for size in wanted if size not in graphs._sizes)
    assert [record.message for record in caplog.records] == [
        f"{1064 * MEGABYTE} bytes have no room for the CUDA graphs of {left_out} rows: smaller "
        "steps compute more rows of padding"
    ]


def test_what_is_without_a_graph_is_said(caplog: pytest.LogCaptureFixture) -> None:
    graphs = FakeGraphs()
    with caplog.at_level("WARNING"):
        graphs.capture(capture_sizes(1024), graphs.used_bytes, 1000 * MEGABYTE)
    assert graphs.max_size == 992, "one less, and one less again"
    assert "the CUDA graphs of" in caplog.text
    assert "1008, 1024 rows" in caplog.text
    assert "steps of more than 992 rows are computed without" in caplog.text


def test_ranks_capture_the_same_sizes_where_only_one_has_little_memory() -> None:
    ranks = thread_ranks(2, 1)
    graphs = [FakeGraphs(parallel) for parallel in ranks]

    def capture(parallel: ParallelState) -> None:
        own = graphs[parallel.rank]
        own.capture(capture_sizes(16), own.used_bytes, (15, 30)[parallel.rank] * MEGABYTE)

    run_on_ranks(ranks, capture)
    assert graphs[0].attempts == graphs[1].attempts
    assert [one._sizes for one in graphs] == [[1, 2, 4, 8]] * 2


def test_rows_of_padding_go_where_nobody_reads() -> None:
    batch = InputBatch(4, 64, 16, 100)
    for name, token_ids, num_computed, blocks in (("a", [5, 6, 7], 2, [2]), ("b", list(range(20)), 20, [0, 3])):
        params = SamplingParams(temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=2**63 + 1)
        batch.add(NewRequestData(name, token_ids, len(token_ids), params, [], blocks, num_computed))
    batch.expect_tokens(np.array([batch.slots["b"]]))
    graphs = DecodeGraphs(None, [], batch, torch.zeros(5), 64, lambda: run_as_captured)  # type: ignore[arg-type]
    graphs._declare_columns(144)
    inputs = StepInputs.of(batch, SchedulerOutput({"a": 1, "b": 1}))
    graphs._inputs = torch.from_numpy(graphs._lay_out(inputs, 4)[0])
    columns = {name: column.tolist() for name, column in graphs._views(4).items()}
    floats = [columns.pop(name) for name in ("temperature", "top_p", "min_p")]
    assert columns == {
        "token_ids": [7, 0, 0, 0],
        "from_device": [0, 1, 0, 0],
        "slots": [batch.slots["a"], batch.slots["b"], 4, 4],
        "positions": [2, 20, 0, 0],
        "slot_mapping": [2 * 16 + 2, 3 * 16 + 4, 144, 144],
        "seq_lens": [3, 21, 1, 1],
        "top_k": [3, 3, 1, 1],
        "seeds": [-(2**63) + 1] * 2 + [0, 0],
    }
    assert floats == [[0.5, 0.5, 0, 0], [0.25, 0.25, 0, 0], [0.125, 0.125, 0, 0]]


def test_a_draft_is_a_row_of_its_requests_blocks_that_ends_there() -> None:
    batch = InputBatch(4, 64, 16, 100)
    for name, num_tokens, blocks in (("a", 16, [2, 5]), ("b", 3, [4])):
        batch.add(
            NewRequestData(name, list(range(num_tokens)), num_tokens, SamplingParams(), [], blocks, num_tokens - 1)
        )
    batch.place_drafts("a", [71, 72])
    graphs = DecodeGraphs(None, [], batch, torch.zeros(5), 64, lambda: run_as_captured)  # type: ignore[arg-type]
    graphs._declare_columns(144)
    graphs._sizes = [4]
    inputs = StepInputs.of(batch, SchedulerOutput({"a": 3, "b": 1}, draft_token_ids={"a": [71, 72]}))
    assert graphs.takes(inputs)
    graphs._inputs = torch.from_numpy(graphs._lay_out(inputs, 4)[0])
    columns = {name: column.tolist() for name, column in graphs._views(4).items()}
    a, b = batch.slots["a"], batch.slots["b"]
    assert (columns["token_ids"], columns["from_device"]) == ([15, 71, 72, 2], [0, 0, 0, 0])
    assert (columns["slots"], columns["positions"]) == ([a, a, a, b], [15, 16, 17, 2])
    assert (columns["slot_mapping"], columns["seq_lens"]) == (
        [2 * 16 + 15, 5 * 16, 5 * 16 + 1, 4 * 16 + 2],
        [16, 17, 18, 3],
    )
    whole_prompt = StepInputs.of(batch, SchedulerOutput({"b": 3}))
    assert not graphs.takes(whole_prompt), "it samples after its last token alone"


def test_a_row_goes_on_from_the_state_of_its_request() -> None:
    """Request a has the state after 6 tokens and computes the two after these again, which were drafts: in blocks of 16
    tokens it stores one state, and two in blocks of 8, where these tokens fill a block."""
    for block_size, takes in ((16, True), (8, False)):
        batch = InputBatch(3, 64, block_size, 100, num_groups=2, has_states=True)
        for name, num_tokens in (("a", 9), ("b", 3)):
            blocks = [*range(100, 106), *range(200, 206)][:: 1 if name == "a" else -1]
            batch.add(
                NewRequestData(name, list(range(num_tokens)), num_tokens, SamplingParams(), [], blocks, num_tokens - 1)
            )
        a, b = batch.slots["a"], batch.slots["b"]
        batch.num_state_tokens[a], batch.state_blocks[a] = 6, 50
        graphs = DecodeGraphs(None, [], batch, torch.zeros(4), 64, lambda: run_as_captured)  # type: ignore[arg-type]
        graphs._declare_columns(144, 9)
        graphs._sizes = [3]
        target = int(batch.block_tables[1][a, 8 // block_size])
        inputs = StepInputs.of(batch, SchedulerOutput({"a": 1, "b": 1}))
        assert graphs.takes(inputs) == takes
        graphs._inputs = torch.from_numpy(graphs._lay_out(inputs, 3)[0])
        columns = {name: column.tolist() for name, column in graphs._views(3).items()}
        own = int(batch.block_tables[1][b, 0])
        assert columns["state_sources"] == [50, own, -1]
        assert columns["num_replayed"] == [2, 0, 0]
        assert columns["state_targets"] == [target, own, 9]
        batch.place_drafts("b", [71])
        assert not graphs.takes(StepInputs.of(batch, SchedulerOutput({"b": 2}, draft_token_ids={"b": [71]})))


@pytest.mark.parametrize(("slots", "graph"), [((-1, -1), "without"), ((-1, 0), "with")])
def test_a_step_without_adapters_has_no_column_of_them(slots: tuple[int, int], graph: str) -> None:
    batch = InputBatch(2, 64, 16, 100, columns=(ADAPTER,))
    for name, block in (("a", 1), ("b", 2)):
        batch.add(NewRequestData(name, [7], 1, SamplingParams(), [], [block], 0))
    batch.adapter_slots[:2] = slots
    graphs = DecodeGraphs(None, [], batch, torch.zeros(3), 64, lambda: run_as_captured)  # type: ignore[arg-type]
    graphs._declare_columns(0)
    graphs._inputs = torch.zeros(graphs._num_planes * COLUMN_STEP, dtype=torch.int64)
    graphs._block_tables, graphs._hidden, graphs._sizes = [], torch.zeros(2, 4), [2]
    replayed: list[str] = []
    graphs._graphs = {2: _Graph(lambda: replayed.append("with"), None, lambda: replayed.append("without"))}
    graphs(StepInputs.of(batch, SchedulerOutput({"a": 1, "b": 1})))
    assert replayed == [graph]
    assert graphs._views(2)["adapter"].tolist() == list(slots)


@pytest.mark.parametrize("layers", [(0, 2), (0, 1, 2)], ids=str)
@torch.inference_mode()
def test_graphs_of_a_model_with_states_compute_what_it_computes_without(
    layers: tuple[int, ...], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts op by op, and a few steps with a row of padding."""
    has_attention = len(layers) < 3
    if has_attention and not INTERPRETED.value:
        pytest.skip("the interpreter is off where there is a GPU; see tests/conftest.py")
    install(monkeypatch.setattr, layers, is_captured=True)
    folder, block_size, num_blocks = checkpoint("qwen3"), 4, 9
    with interpreted_kernels() if has_attention else nullcontext():
        config = CheckpointConfig.from_folder(folder)
        model = model_loader.load_model(folder, config, torch.float32, 64)
        groups = config.kv_cache_groups(64, block_size, True)
        batches = [InputBatch(3, 64, block_size, VOCAB_SIZE, groups.num_groups, (), True) for _ in range(2)]
        prompts = {"a": [7, 5, 3, 9, 2, 4], "b": [3, 1, 4]}
        for batch in batches:
            for name, (first, *others) in {"a": (1, 2, 3), "b": (4, 5, 6)}.items():
                ids = [one for block in (first, *others) for one in [block] * groups.num_groups]
                batch.add(NewRequestData(name, prompts[name], len(prompts[name]), SamplingParams(), [], ids, 0))
        group_ids = [groups.num_groups - 1 if spec.window == STATE else 0 for spec in model.state_specs]
        caches = [
            [
                tuple(torch.zeros(num_blocks, *tensor.block_shape(block_size)) for tensor in spec.tensors)
                for spec in model.state_specs
            ]
            for _ in range(2)
        ]
        eager, reference = (
            EagerForward(model, own, batch, None, group_ids) for own, batch in zip(caches, batches, strict=True)
        )
        graphs = DecodeGraphs(
            model, caches[0], batches[0], torch.zeros(4, dtype=torch.int64), 64, lambda: run_as_captured,
            group_ids=group_ids,
        )  # fmt: skip
        graphs.capture([3], lambda: 0, 1)
        scheduled = {name: len(tokens) for name, tokens in prompts.items()}
        for step in range(4):
            own, expected = (StepInputs.of(batch, SchedulerOutput(scheduled)) for batch in batches)
            assert graphs.takes(own) == (step > 0)
            forward: Any = graphs if step else eager
            torch.testing.assert_close(forward(own).clone(), reference(expected), rtol=1e-5, atol=1e-5)
            for batch in batches:
                batch.num_computed_tokens[:2] += [scheduled[name] for name in prompts]
                batch.expect_tokens(np.arange(2))
                batch.settle_tokens(np.arange(2), batch.num_tokens[:2] - 1, np.array([11 + step, 12]))
            scheduled = dict.fromkeys(prompts, 1)


def test_the_device_has_the_blocks_of_every_slot_that_was_named() -> None:
    """Whatever came between two steps of a request: other steps, and other users of its slot."""
    rng = np.random.default_rng(0)
    batch = InputBatch(4, 640, 16, 100)
    table = DeviceBlockTable(batch, torch.device("cpu"))
    live: list[str] = []
    for number in range(200):
        if len(live) == 4 or (live and rng.random() < 0.3):
            batch.remove(live.pop(rng.integers(len(live))))
        name = f"r{number}"
        batch.add(
            NewRequestData(name, [1], 1, SamplingParams(), [], rng.integers(1, 99, rng.integers(1, 9)).tolist(), 0)
        )
        live.append(name)
        for slot in rng.permutation([batch.slots[name] for name in live])[: rng.integers(len(live) + 1)]:
            batch.append_blocks(slot, rng.integers(1, 99, min(rng.integers(3), 40 - batch.num_blocks[slot])).tolist())
        slots = rng.permutation([batch.slots[name] for name in live])[: rng.integers(1, len(live) + 1)]
        table.update(slots)
        for slot in slots:
            number_there = batch.num_blocks[slot]
            assert table.by_slot[slot, :number_there].tolist() == batch.block_table[slot, :number_there].tolist()
    assert not table.by_slot[4].any()


def test_a_model_that_wakes_up_has_graphs_of_its_new_memory(checkpoint: Callable[[str], Path]) -> None:
    if not INTERPRETED.value:
        pytest.skip("the interpreter is off where there is a GPU; see tests/conftest.py")
    with interpreted_kernels():
        llm = LLM(
            checkpoint("tied-gqa"), dtype="float32", max_num_seqs=2, max_model_len=32, enable_prefix_caching=False
        )
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        before = llm.generate([[3, 4, 5]], params, use_tqdm=False)[0].outputs[0].token_ids
        runner = llm._core.executor._worker.runner  # type: ignore[attr-defined]
        graphs = runner.graphs
        llm.sleep(level=2)
        assert runner.graphs is None
        llm.wake_up()
        assert runner.graphs is not graphs
        assert llm.generate([[3, 4, 5]], params, use_tqdm=False)[0].outputs[0].token_ids == before
