"""AdapterStore: the adapters of a rank, in the cells of its memory and in the slots of its layers' tables.

::

    orders ─► loads ─► a thread: read, slice, convert ─► cell ─► board
           └► slots ─► the layers' tables                  └── on a GPU, copied there when it gets a slot

A load reads what the frontend has read and checked, by the digest; a rank takes its part of each matrix. The thread
waits for its disk, and computes in small pieces, so that no step waits long for it. On the CPU, a step that fills a
slot writes addresses alone.

DoRA divides by the norms of whole rows. Where each rank has some columns of a row, the ranks add up the squares of
their parts in the first step that has the adapter, and multiply B by the factors then.
"""

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from quire_kernels import LoraSlot, LoraWeight, lora_sizes, pack_linear, pack_lora, rescale_lora

from quire_engine.adapters.adaptable import (
    AdaptableLayer,
    adaptable_layers,
    expert_linears,
    planned_bytes,
    replaceable_tables,
)
from quire_engine.adapters.board import AdapterBoard, LoadOutcome
from quire_engine.adapters.checkpoint import AdapterCheckpoint
from quire_engine.adapters.files import (
    NICENESS,
    PIECE,
    WEIGHTS,
    AdapterMatrix,
    digest_of,
    parse_tensors,
    pause,
    read_files,
)
from quire_engine.config import LoRAConfig
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError, EngineDeadError
from quire_engine.lora import AdaptableModules, Adapter
from quire_engine.messages import AdapterLoad, AdapterOrders
from quire_engine.models.base import CausalLM
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import OwnTable, Packable, StepAdapters, TableChange, VocabParallel
from quire_engine.models.linear.base import bands
from quire_engine.models.mapped import mapped_zeros
from quire_engine.models.step_context import ADAPTER
from quire_engine.system.process_state import lower_priority

logger = logging.getLogger(__name__)

Matrices = list[list[tuple[torch.Tensor, torch.Tensor] | None]]
"""A and B of the rank, by layer, then by projection; None where the adapter changes nothing."""
_BAND = 1 << 16
"""Numbers of the base's weight that are dequantised at a time: so few that one thread does it."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True)
class _Cell:
    """A loaded adapter, in one of two forms."""

    slots: list[LoraSlot] = field(default_factory=list)
    """By layer, as the layers compute with them on the CPU."""
    norms: list["_PartialNorms"] = field(default_factory=list)
    """That the ranks have not yet added up."""
    matrices: Matrices = field(default_factory=list)
    """Views of `staged`."""
    staged: torch.Tensor | None = None
    """With a GPU: all matrices, one after the other, in memory that it copies from."""
    own_tables: dict[str, OwnTable | TableChange] = field(default_factory=dict)
    """By the name of a table, on the device."""
    has_tables: bool = False
    """Whether any stage has one of these."""


class _PartialNorms(NamedTuple):
    """With DoRA, what this rank has of the norms of the rows of a projection."""

    layer: int
    number: int
    squares: torch.Tensor
    """float32 [N], sums over the rank's columns of W + B · A."""
    magnitude: torch.Tensor
    """float32 [N]."""


_NOTHING = _Cell()


class AdapterStore:
    """Loads adapters, and puts them into slots. `attach` comes first; all but the loading is done by the thread that
    computes steps.

    Args:
        config: the settings.
        modules: of the whole model.
        board: where loads are reported.
        parallel: the rank, whose row is written there.
    """

    def __init__(
        self, config: LoRAConfig, modules: AdaptableModules, board: AdapterBoard, parallel: ParallelState
    ) -> None:
        self._config, self._modules, self._board, self._parallel = config, modules, board, parallel
        self._layers: list[AdaptableLayer] = []
        self._tables: dict[str, VocabParallel] = {}
        self._cells: dict[int, _Cell] = {}
        self._in_slots: dict[int, _Cell] = {}
        self._loads: queue.SimpleQueue[AdapterLoad | _Cell | None] = queue.SimpleQueue()
        """And what is not needed any more: to free its memory takes milliseconds."""
        self._wanted: dict[int, int] = {}
        """By cell, the number of its latest load: an earlier one is dropped."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def attach(self, model: CausalLM, device: torch.device) -> None:
        """Give the layers of a model their tables. Nothing is in a slot afterwards."""
        assert isinstance(model, Decoder)
        step = model.step_adapters = StepAdapters()
        self._layers = list(adaptable_layers(model))
        if not self._modules.why_not_experts:
            self._layers += expert_linears(model)
        self._like = like = torch.empty(0, dtype=model.dtype, device=device)
        """Has the dtype and the device of activations."""
        for layer in self._layers:
            layer.enable_adapters(step, self._config.max_loras, self._config.max_lora_rank, like)
        self._tables, self._step = replaceable_tables(model), step
        for table in self._tables.values():
            table.enable_tables(step)
        model.row_columns = (*model.row_columns, ADAPTER)
        self._in_slots.clear()

    def detach(self) -> None:
        """Hold no layer of a model whose memory is to be freed; `attach` follows."""
        self._layers, self._tables = [], {}

    @property
    def planned_bytes(self) -> int:
        """As of `planned_bytes`."""
        layers = [one for one in self._layers if isinstance(one, Packable)]
        return planned_bytes(self._config, layers, self._like)

    def begin_step(self, orders: AdapterOrders) -> None:
        """Begin loads, and fill slots, whose adapters are loaded. Raises EngineDeadError if a slot cannot be filled."""
        with self._lock:
            for load in orders.loads:
                self._loads.put(self._cells.pop(load.cell, _NOTHING))
                self._wanted[load.cell] = load.number
                self._loads.put(load)
        if orders.loads and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()
        try:
            for slot, cell in orders.slots:
                found = self._cells.get(cell)
                if found is not None:
                    self._fill(slot, found)
                elif slot in self._in_slots:
                    self._clear(slot)
        except Exception as error:  # requests would be computed with what was in the slot before
            raise EngineDeadError(f"an adapter cannot be put into its slot: {error!r}") from error

    def drop_all(self) -> None:
        """Free the memory of all adapters."""
        with self._lock:
            self._cells.clear()
            self._wanted.clear()
        for slot in list(self._in_slots):
            self._clear(slot)

    def close(self) -> None:
        """End the thread; a load that is under way is not waited for."""
        with self._lock:
            self._wanted.clear()
        self._loads.put(None)

    def _fill(self, slot: int, cell: _Cell) -> None:
        if cell.norms:
            self._add_up_norms(cell)
        own: Sequence[LoraSlot | list[LoraWeight | None]] = cell.slots
        if cell.staged is not None:
            own = _copied(cell.matrices, cell.staged, self._like.device)
        for layer, adapter in zip(self._layers, own, strict=True):
            assert layer.lora_table is not None
            layer.lora_table.set_slot(slot, adapter)
        self._use_tables(slot, cell)
        self._loads.put(self._in_slots.pop(slot, _NOTHING))
        self._in_slots[slot] = cell

    def _add_up_norms(self, cell: _Cell) -> None:
        """All ranks of the stage do so in the same step."""
        group = self._parallel.tensor_group
        assert group is not None
        squares = torch.split(
            group.all_reduce(torch.cat([part.squares for part in cell.norms])),
            [len(part.squares) for part in cell.norms],
        )
        for part, squares_N in zip(cell.norms, squares, strict=True):
            weights = cell.slots[part.layer].weights
            expert, projection = divmod(part.number, len(weights[0]))
            weight = weights[expert][projection]
            assert weight is not None
            # A row of zeros, which a rank alone cannot know of, stays one.
            scales_N = torch.where(squares_N > 0, part.magnitude / squares_N.sqrt(), 0.0)
            rescale_lora(weight, scales_N.nan_to_num(posinf=0.0))
        cell.norms.clear()

    def _clear(self, slot: int) -> None:
        for layer in self._layers:
            if layer.lora_table is not None:
                layer.lora_table.clear_slot(slot)
        self._use_tables(slot, _NOTHING)
        self._loads.put(self._in_slots.pop(slot, _NOTHING))

    def _use_tables(self, slot: int, cell: _Cell) -> None:
        for name, table in self._tables.items():
            by_slot = table.own_heads if name == "lm_head" else table.own_embeddings
            by_slot.pop(slot, None)
            if name in cell.own_tables:
                by_slot[slot] = cell.own_tables[name]
        self._step.with_tables.discard(slot)
        if cell.has_tables:
            self._step.with_tables.add(slot)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority(NICENESS)
        if self._like.is_cuda:
            torch.cuda.set_device(self._like.device)
        while (load := self._loads.get()) is not None:
            if isinstance(load, AdapterLoad):
                with self._lock:
                    is_wanted = self._wanted.get(load.cell) == load.number
                if is_wanted:
                    outcome = self._load(load)
                    self._board.put(self._parallel.rank, load.cell, load.number, outcome)
            del load  # which else keeps the memory of a cell until the next one comes

    def _load(self, load: AdapterLoad) -> LoadOutcome:
        adapter = load.adapter
        try:
            read = self._read(adapter)
            if isinstance(read, LoadOutcome):
                return read
            cell = self._converted_layers(read)
            cell.has_tables = read.changes_tables
            for name, table in self._tables.items():
                if name in read.tables or name in read.modules:
                    cell.own_tables[name] = self._own_table(name, table, read)
        except (MemoryError, torch.OutOfMemoryError):
            logger.exception("there is no memory for the adapter %s", adapter.folder)
            return LoadOutcome.NO_MEMORY
        except Exception:
            logger.exception("the adapter %s cannot be loaded", adapter.folder)
            return LoadOutcome.FAILED
        with self._lock:
            if self._wanted.get(load.cell) == load.number:
                self._cells[load.cell] = cell
        return LoadOutcome.READY

    def _read(self, adapter: Adapter) -> AdapterCheckpoint | LoadOutcome:
        folder = Path(adapter.folder)
        try:
            config, content = read_files(folder, self._modules)
        except CheckpointError as error:
            logger.error("the adapter cannot be read any more: %s", error)
            return LoadOutcome.MISSING
        if digest_of(config, content) != adapter.digest:
            logger.error("%s: the adapter's files have changed since it was registered", folder)
            return LoadOutcome.CHANGED
        tensors = dict(parse_tensors(folder / WEIGHTS, content))
        return AdapterCheckpoint.of(folder, config, tensors, adapter.digest, self._modules, self._config.max_lora_rank)

    def _converted_layers(self, read: AdapterCheckpoint) -> _Cell:
        matrices: Matrices = []
        cell, dtype = _Cell(), self._like.dtype
        sizes = [
            [
                lora_sizes(read.modules[name].rank, _length(one.columns), _length(one.rows), dtype)
                for name, one in zip(layer.names, layer.projections, strict=True)
                if name in read.modules
            ]
            for layer in self._layers
        ]
        places = iter([] if self._like.is_cuda else _huge_pages(sizes, dtype))
        for layer in self._layers:
            pause()
            own, scales = self._of_layer(layer, read, cell.norms)
            if self._like.is_cuda:  # where there are no scales
                matrices.append(own)
                continue
            weights: list[LoraWeight | None] = []
            for number, (pair, scales_N) in enumerate(zip(own, scales, strict=True)):
                if number % PIECE == PIECE - 1:
                    pause()
                weights.append(None if pair is None else pack_lora(*pair, scales_N=scales_N, out=next(places)))
            assert layer.lora_table is not None
            cell.slots.append(layer.lora_table.prepare(weights))
        return _staged(matrices) if matrices else cell

    def _of_layer(
        self, layer: AdaptableLayer, read: AdapterCheckpoint, norms: list[_PartialNorms]
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor] | None], list[torch.Tensor | None]]:
        """A and B of each projection, and the scales of the base's results beside them: 1 where this rank has parts of
        the norms, which are appended."""
        matrices: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        scales: list[torch.Tensor | None] = []
        for number, (name, one) in enumerate(zip(layer.names, layer.projections, strict=True)):
            module = read.modules.get(name)
            scales.append(None)
            if module is None:
                matrices.append(None)
                continue
            if number % PIECE == PIECE - 1:
                pause()
            whole_b = _tensor(module.b)[module.b_rows, module.b_columns]
            a_RK, b_NR = layer.adapter_slice(number, _tensor(module.a)[module.a_rows], whole_b)
            dtype, scaling = self._like.dtype, module.scaling
            b_NR = b_NR if scaling == 1 else b_NR.float() * scaling
            if module.magnitude is not None:
                whole_N1 = _tensor(module.magnitude)[module.b_rows].float()
                magnitude_N = layer.adapter_slice(number, a_RK, whole_N1)[1].squeeze(1)
                squares_N = _squares(layer, number, a_RK.float(), b_NR.float())
                if one.columns == slice(0, one.shape[1]):
                    scales[-1] = scales_N = magnitude_N / squares_N.sqrt()
                    if not scales_N.isfinite().all():
                        raise CheckpointError(f"a row of the base and of the adapter's matrices of {name} is zero")
                    b_NR = b_NR * scales_N[:, None]
                else:
                    scales[-1] = torch.ones_like(squares_N)
                    norms.append(_PartialNorms(self._layers.index(layer), number, squares_N, magnitude_N))
            a_RK, b_NR = a_RK.to(dtype), b_NR.to(dtype)
            is_b_as_read = DTYPES[module.b.dtype] == dtype and scaling == one.scale == 1 and module.magnitude is None
            are_as_read = DTYPES[module.a.dtype] == dtype, is_b_as_read
            for half, matrix, is_as_read in zip("AB", (a_RK, b_NR), are_as_read, strict=True):
                if not is_as_read and not matrix.isfinite().all():
                    raise CheckpointError(f"the adapter's matrix {half} of {name} is too large for {dtype}")
            matrices.append((a_RK, b_NR))
        return matrices, scales

    def _own_table(self, name: str, table: VocabParallel, read: AdapterCheckpoint) -> OwnTable | TableChange:
        (one,), is_head, module = table.projections, name == "lm_head", read.modules.get(name)
        size = one.rows.stop - one.rows.start + table.padding
        if module is None:
            matrix_VE = _tensor(read.tables[name])
            own_VE = self._converted(name, matrix_VE[one.rows], size, one.scale)
            return OwnTable(pack_linear(own_VE) if is_head else own_VE, len(matrix_VE))
        is_odd, scaling = module.rank % 2, module.scaling * one.scale  # no kernel takes an odd number of columns
        a_RK, b_NR = F.pad(_tensor(module.a), (0, 0, 0, is_odd)), F.pad(_tensor(module.b), (0, is_odd))
        if is_head:
            b = pack_linear(self._converted(name, b_NR[one.rows], size, scaling))
            return TableChange(pack_linear(self._converted(name, a_RK, len(a_RK))), b)
        b = pack_linear(self._converted(name, b_NR, len(b_NR), scaling))
        return TableChange(self._converted(name, a_RK[:, one.rows].t(), size), b)

    def _converted(self, name: str, matrix: torch.Tensor, size: int, scaling: float = 1.0) -> torch.Tensor:
        """A matrix in the dtype of activations, on the device, with zeros behind it up to so many rows."""
        columns = matrix.shape[1]
        own = torch.zeros(size, columns, dtype=self._like.dtype, device=self._like.device)
        for rows in bands(0, len(matrix), columns):
            pause()
            band = matrix[rows] if scaling == 1 else matrix[rows].float() * scaling
            band = band.to(self._like.dtype)
            if not band.isfinite().all():
                raise CheckpointError(f"the adapter's matrix of {name} is too large for {self._like.dtype}")
            own[rows] = band
        return own


def _squares(layer: AdaptableLayer, number: int, a_RK: torch.Tensor, b_NR: torch.Tensor) -> torch.Tensor:
    """‖W + B · A‖² of each row, [N], which DoRA divides by (Liu et al. 2024, https://arxiv.org/abs/2402.09353, section
    4.1)."""
    squares_N = torch.empty(len(b_NR))
    height = max(1, _BAND // a_RK.shape[1])
    for first in range(0, len(b_NR), height):
        pause()
        rows = slice(first, min(first + height, len(b_NR)))
        squares_N[rows] = (layer.weight_band(number, rows) + b_NR[rows] @ a_RK).square_().sum(dim=1)
    return squares_N


def _huge_pages(sizes: list[list[tuple[int, int]]], dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Where to pack A and B of the projections of each layer: in one mapping, by layer A of all and then B. A step
    reads little of each of many adapters, for which it would look up the address of every small page."""
    whole = sum(_aligned(size) for own in sizes for pair in own for size in pair)
    memory = mapped_zeros((whole,), dtype, huge_pages=True)
    places: list[tuple[torch.Tensor, torch.Tensor]] = []
    for own in sizes:
        halves: list[list[torch.Tensor]] = [[], []]
        for number, half in enumerate(halves):
            for pair in own:
                half.append(memory[: pair[number]])
                memory = memory[_aligned(pair[number]) :]
        places += zip(*halves, strict=True)
    return places


def _staged(matrices: Matrices) -> _Cell:
    """The matrices in memory that a GPU copies from."""
    flat = [matrix for own in matrices for pair in own if pair is not None for matrix in pair]
    if not flat:  # it changes no layer of this stage
        return _Cell(matrices=matrices, staged=torch.empty(0))
    size, like = sum(_aligned(one.numel()) for one in flat), flat[0]
    staged = torch.empty(size, dtype=like.dtype, pin_memory=torch.cuda.is_available())
    places = iter(_places(matrices, staged))
    views: Matrices = [[None if pair is None else next(places) for pair in own] for own in matrices]
    for own, there in zip(matrices, views, strict=True):
        for pair, place in zip(own, there, strict=True):
            if pair is not None and place is not None:
                place[0].copy_(pair[0])
                place[1].copy_(pair[1])
    return _Cell(matrices=views, staged=staged)


def _copied(matrices: Matrices, staged: torch.Tensor, device: torch.device) -> list[list[LoraWeight | None]]:
    """What the layers compute with on a device, by one copy."""
    places = iter(_places(matrices, staged.to(device, non_blocking=True)))
    return [[None if pair is None else pack_lora(*next(places)) for pair in own] for own in matrices]


def _places(matrices: Matrices, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Where each pair is among all matrices, which are one after the other."""
    first = 0
    for own in matrices:
        for pair in own:
            if pair is not None:
                views = []
                for matrix in pair:
                    views.append(flat[first : first + matrix.numel()].view(matrix.shape))
                    first += _aligned(matrix.numel())
                yield views[0], views[1]


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _tensor(matrix: AdapterMatrix) -> torch.Tensor:
    return torch.frombuffer(matrix.content, dtype=DTYPES[matrix.dtype]).view(matrix.shape)


def _aligned(number: int) -> int:
    """Matrices begin at multiples of 128 bytes."""
    return -(-number // 64) * 64
