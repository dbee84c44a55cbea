"""Weights: from safetensors files, memory-mapped, into a model's parameters, converted on the way; or random ones.

Each rank reads its own slice of each tensor and nothing else; tensors of other stages are not touched. What has been
read is let go of, and a matrix is packed as soon as it is whole: loading takes hardly more memory than the model.
"""

import contextlib
import zlib
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.memory import release_pages, trim_heap
from quire_engine.models.checkpoint import CheckpointConfig, check_safetensors, weight_files
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.parallel import Packable, load_targets
from quire_engine.models.registry import MODELS
from quire_engine.transfer import CPU

__all__ = ["load_model"]

DUMMY_STD = 0.02
"""Standard deviation of random weights: what models are initialised with before they are trained."""


def load_model(
    folder: Path,
    config: CheckpointConfig,
    dtype: torch.dtype,
    max_model_len: int,
    parallel: ParallelState = ParallelState(),
    quantized_dtype: torch.dtype | None = None,
    device: torch.device = CPU,
    load_format: str = "auto",
) -> LlamaForCausalLM:
    """Build a rank's part of the model on a device, fill every parameter, and pack the matrices, quantised if a dtype
    is given.

    With the load format `dummy` no file is read, and the weights are random numbers, the same each time.

    Raises:
        CheckpointError: a file is truncated, or a tensor is missing, superfluous or of the wrong shape.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with contextlib.nullcontext() if device.type == "cpu" else device:
            model = MODELS[config.architecture](config, max_model_len, parallel)
    finally:
        torch.set_default_dtype(previous)
    elsewhere: Collection[str] = ()
    if parallel.pipeline_parallel_size > 1:
        with torch.device("meta"):
            elsewhere = load_targets(MODELS[config.architecture](config, max_model_len)).keys()
    loading = _Loading(model, quantized_dtype)
    if load_format == "dummy":
        for name in sorted(loading.names):
            loading.fill(name, None)
        return model.eval()
    for path in weight_files(folder):
        check_safetensors(path)
        _load_file(path, loading, elsewhere)
    if loading.targets:
        raise CheckpointError(f"{folder}: its safetensors files hold no {', '.join(sorted(loading.targets)[:3])}")
    trim_heap()
    return model.eval()


class _Loading:
    """What a model still waits for."""

    def __init__(self, model: LlamaForCausalLM, quantized_dtype: torch.dtype | None) -> None:
        self.targets = load_targets(model)
        """By name; of tensors that have not come yet."""
        self.names = frozenset(self.targets)
        self._quantized_dtype = quantized_dtype
        self._num_missing: Counter[Packable | None] = Counter(target.module for target in self.targets.values())

    def fill(self, name: str, tensor: torch.Tensor | None) -> None:
        """Take a tensor, or random numbers for None, and pack what is whole with it. The target, which holds the
        parameter, is forgotten first."""
        target = self.targets.pop(name)
        if tensor is None:
            _randomize(target.parameter, name)
        else:
            target.parameter.copy_(tensor)
        module = target.module
        del target
        self._num_missing[module] -= 1
        if module is not None and not self._num_missing[module]:
            module.pack(self._quantized_dtype)


def _load_file(path: Path, loading: _Loading, elsewhere: Collection[str]) -> None:
    """Copy what the file holds.

    Args:
        path: a safetensors file.
        loading: where this rank's slices go.
        elsewhere: names that other stages want.
    """
    try:
        with safe_open(path, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                name = key.removeprefix("model.")
                target = loading.targets.get(name)
                if target is None:
                    # The copy of a tied head, and the frequency tables of old checkpoints, are derived here.
                    known = name in loading.names or name in elsewhere
                    if known or name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                        continue
                    raise CheckpointError(f"{path}: tensor {key} has no place in this architecture")
                tensor = tensors.get_slice(key)
                shape = tuple(tensor.get_shape())
                if shape != target.shape:
                    raise CheckpointError(
                        f"{path}: tensor {key} has shape {shape}; config.json asks for {target.shape}"
                    )
                if (tensor.get_dtype() == "I8") != (target.parameter.dtype == torch.int8):
                    raise CheckpointError(
                        f"{path}: tensor {key} is {tensor.get_dtype()}; quantization_config in config.json asks for "
                        f"{'I8' if target.parameter.dtype == torch.int8 else 'a floating-point type'}"
                    )
                piece, target = tensor[target.index], None
                loading.fill(name, piece)
                if piece.numel():
                    _release(piece)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _randomize(parameter: torch.Tensor, name: str) -> None:
    """Of the name alone: what several ranks hold of a tensor is alike on all of them, and so are all loads."""
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
    if parameter.dtype == torch.int8:
        parameter.random_(-127, 128, generator=generator)
    else:
        parameter.normal_(std=DUMMY_STD, generator=generator)


def _release(tensor: torch.Tensor) -> None:
    """Let go of the file's pages that a tensor is a view of."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    release_pages(tensor.data_ptr(), elements * tensor.itemsize)
