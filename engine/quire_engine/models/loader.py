"""Loads weights from memory-mapped safetensors files into a model's parameters and converts them, or makes random ones.

Each rank reads only its own slice of each tensor; tensors of other stages are not touched. Pages that have been read
are released, and a matrix is packed as soon as it is complete, so loading takes hardly more memory than the model.
"""

import contextlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from quire_engine.device.transfer import CPU
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.files import StoredTensor
from quire_engine.models.parallel import Packable, load_targets
from quire_engine.models.progress import LoadProgress
from quire_engine.models.tensor_reader import TensorReader
from quire_engine.models.weights import check_weights
from quire_engine.system.memory import trim_heap

__all__ = ["build", "check_finite", "load_model", "load_tensors"]

DUMMY_STD = 0.02
"""Standard deviation of random weights, as in the usual initialisation of models before training."""


def load_model(
    folder: Path,
    config: CheckpointConfig,
    dtype: torch.dtype,
    max_model_len: int,
    parallel: ParallelState = ParallelState(),
    quantized_dtype: torch.dtype | None = None,
    device: torch.device = CPU,
    load_format: str = "auto",
) -> Decoder:
    """Build a rank's part of the model on a device, fill every parameter, and pack the matrices, quantised if a dtype
    is given.

    With the load format `dummy` no weight file is read, and the weights are random numbers, the same each time.

    Raises:
        CheckpointError: a file is truncated; a tensor is missing, superfluous, of the wrong shape or type, or holds
            a value that is not finite.
    """
    is_dummy = load_format == "dummy"
    # First, so that nothing is allocated for a configuration that does not match the files.
    files = {} if is_dummy else check_weights(folder, config, reports=parallel.rank == 0)
    model = build(lambda: Decoder(config, max_model_len, parallel), dtype, device)
    if is_dummy:
        loading = _Loading(model, quantized_dtype)
        for name in sorted(loading.targets):
            loading.fill(name, None)
    else:
        load_tensors(model, files, quantized_dtype, reports=parallel.rank == 0)
    for mixture in model.mixtures.values():
        mixture.pack()
    return model.eval()


Model = TypeVar("Model", bound=nn.Module)


def build(make: Callable[[], Model], dtype: torch.dtype, device: torch.device) -> Model:
    """Make a module whose parameters are of a dtype, on a device."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with contextlib.nullcontext() if device.type == "cpu" else device:
            return make()
    finally:
        torch.set_default_dtype(previous)


def load_tensors(
    model: nn.Module,
    files: Mapping[Path, Mapping[str, StoredTensor]],
    quantized_dtype: torch.dtype | None,
    *,
    reports: bool = True,
) -> None:
    """Fill every parameter of a module from files, and pack the matrices, quantised if a dtype is given.

    Args:
        model: whose `load_targets` the files hold.
        files: their tensors, by name; others than the model's are left alone.
        quantized_dtype: see `load_model`.
        reports: whether this process logs the progress.

    Raises:
        CheckpointError: a file is damaged, or a tensor holds a value that is not finite.
    """
    loading = _Loading(model, quantized_dtype)
    sizes = {name: tensor.num_bytes for stored in files.values() for name, tensor in stored.items()}
    progress = LoadProgress(sum(sizes[name] for name in loading.targets), reports=reports)
    for path, stored in files.items():
        _load_file(path, stored, loading, progress)
    assert not loading.targets, f"the headers had {sorted(loading.targets)[:3]}"
    trim_heap()


class _Loading:
    """The tensors that a model still has to load."""

    def __init__(self, model: nn.Module, quantized_dtype: torch.dtype | None) -> None:
        self.targets = load_targets(model)
        """By name; only of tensors that are not loaded yet."""
        self._quantized_dtype = quantized_dtype
        self._num_missing: Counter[Packable | None] = Counter(target.module for target in self.targets.values())

    def fill(self, name: str, bands: Iterable[torch.Tensor] | None, source: str = "") -> None:
        """Fill a parameter with a tensor, or with random numbers for None, and pack its module if that completes it.
        Drops the target first, as it keeps the parameter alive.

        Args:
            name: of the tensor.
            bands: the rows of this rank's slice of it, in order.
            source: where it comes from, for messages.

        Raises:
            CheckpointError: it holds a value that is not finite.
        """
        target = self.targets.pop(name)
        if bands is None:
            _randomize(target.parameter, name)
        else:
            first = 0
            for band in bands:
                rows = target.parameter[first : first + len(band)]
                rows.copy_(band)
                check_finite(band, rows, source)
                first += len(band)
                del rows
        if target.offset:
            target.parameter.add_(target.offset)
        module = target.module
        del target
        self._num_missing[module] -= 1
        if module is not None and not self._num_missing[module]:
            module.pack(self._quantized_dtype)


def _load_file(path: Path, stored: Mapping[str, StoredTensor], loading: _Loading, progress: LoadProgress) -> None:
    """Copy the tensors of a file that this rank needs.

    Args:
        path: a safetensors file.
        stored: its tensors, by the names that the model has for them.
        loading: where this rank's slices go.
        progress: counts every tensor.

    Raises:
        CheckpointError: the file is damaged, or a tensor holds a value that is not finite.
    """
    try:
        with TensorReader() as reader:
            for name, tensor in stored.items():
                if name not in loading.targets:  # another stage's, or derived
                    continue
                bands = reader.bands(tensor, loading.targets[name].index)
                loading.fill(name, bands, f"{path}: tensor {tensor.name}")
                progress.add(tensor.num_bytes)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None


def check_finite(tensor: torch.Tensor, parameter: torch.Tensor, source: str) -> None:
    """Refuse weights that would make every logit NaN.

    If a row's sum is finite, all of its terms are; this takes one pass over what was just copied. Rows whose sum is not
    finite are checked again, as the sum may have overflowed.

    Args:
        tensor: as it is stored.
        parameter: the same in the model's dtype.
        source: for messages.

    Raises:
        CheckpointError: a weight is NaN or infinite, or becomes so in that dtype.
    """
    if not parameter.is_floating_point() or not parameter.numel():
        return
    suspicious = (~parameter.sum(-1).isfinite()).reshape(-1).nonzero().flatten().tolist()
    rows, stored_rows = (each.reshape(-1, each.shape[-1]) for each in (parameter, tensor))
    for row in suspicious:
        columns = (~rows[row].isfinite()).nonzero().flatten().tolist()
        if columns:
            value = stored_rows[row, columns[0]].item()
            if math.isfinite(value):
                dtype = str(parameter.dtype).removeprefix("torch.")
                mend = f"that is too large for {dtype}; set dtype to float32 or bfloat16"
            else:
                mend = "weights must be finite numbers"
            raise CheckpointError(f"{source} holds {value}; {mend}")


def _randomize(parameter: torch.Tensor, name: str) -> None:
    """The values depend only on the name: replicas on several ranks are the same, and so is every load."""
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
    if parameter.dtype == torch.int8:
        parameter.random_(-127, 128, generator=generator)
    else:
        parameter.normal_(std=DUMMY_STD, generator=generator)
