"""The device of a rank, which is the CPU or a GPU of its own, and the classification of a GPU's errors.

::

    device    torch finds a GPU    rank i computes on (replicas' ranks are counted on)
    auto      yes                  GPU gpu_device_ids[i], or GPU i
    auto      no                   the CPU
    cuda      –                    GPU gpu_device_ids[i], or GPU i
    cpu       –                    the CPU
"""

import contextlib
from collections.abc import Iterator

import torch

from quire_engine.config import EngineCoreConfig
from quire_engine.errors import EngineDeadError

BFLOAT16_COMPUTE_CAPABILITY = (8, 0)
"""Ampere; earlier GPUs have no bfloat16."""
FP8_COMPUTE_CAPABILITY = (8, 9)
"""Ada."""
LOST_DEVICE_MESSAGES = ("CUDA error", "Triton Error [CUDA]")
"""The beginnings of CUDA errors without a class of their own: those of CUDA's libraries, and Triton's."""


def rank_device(config: EngineCoreConfig, rank: int) -> torch.device:
    """The device of one rank. Allocates nothing on it, so any process may call this.

    Raises:
        ValueError: this machine has no such device.
    """
    parallel = config.parallel
    has_gpu = parallel.device != "cpu" and torch.cuda.is_available()
    if parallel.device == "cpu" or (parallel.device == "auto" and parallel.gpu_device_ids is None and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        asked = "device is 'cuda'" if parallel.device == "cuda" else f"gpu_device_ids is {parallel.gpu_device_ids}"
        raise ValueError(f"{asked}, but {_why_no_gpu()}, or set device to 'cpu'")
    number = (parallel.data_parallel_rank - parallel.data_parallel_start_rank) * parallel.world_size + rank
    index = number if parallel.gpu_device_ids is None else parallel.gpu_device_ids[number]
    num_gpus = torch.cuda.device_count()
    if index >= num_gpus:
        there = "there is 1 (0)" if num_gpus == 1 else f"there are {num_gpus} (0 to {num_gpus - 1})"
        if parallel.gpu_device_ids is not None:
            raise ValueError(f"gpu_device_ids names GPU {index} for rank {number}; {there}")
        raise ValueError(
            f"device is {parallel.device!r}, which takes a GPU for each of {parallel.num_all_ranks} ranks; {there}: "
            "use fewer ranks, or set device to 'cpu'"
        )
    return torch.device("cuda", index)


def prepare_device(config: EngineCoreConfig, checkpoint_dtype: str, rank: int) -> torch.device:
    """The device of this process's rank, which becomes the current one. To be called before anything is allocated.

    Args:
        config: the engine core's settings.
        checkpoint_dtype: used if the setting `dtype` is "auto".
        rank: of this process.

    Raises:
        ValueError: this machine has no such device, or it does not support the model's dtype.
    """
    device = rank_device(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _check_dtypes(config, checkpoint_dtype, device)
    return device


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make this the current device inside the block, in any thread.

    Raises:
        EngineDeadError: a CUDA error after which this process cannot use the GPU any more.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    except Exception as error:
        if _is_device_lost(error):
            cause = next(iter(str(error).splitlines()), "")
            raise EngineDeadError(f"the GPU cannot be used any more: {type(error).__name__}: {cause}") from error
        raise


def _is_device_lost(error: Exception) -> bool:
    """Whether an error leaves the device unusable. Running out of memory does not: the allocation failed, and nothing
    else changed."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return False
    if isinstance(error, torch.AcceleratorError | torch.cuda.CudaError | torch.distributed.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(LOST_DEVICE_MESSAGES)


def has_cuda() -> bool:
    """Whether torch is built with CUDA."""
    return bool(torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]


def _why_no_gpu() -> str:
    if not has_cuda():
        return f"torch {torch.__version__} has no CUDA; install a CUDA build of torch"
    return "torch finds no GPU; see what `quire doctor` says of them and whether CUDA_VISIBLE_DEVICES hides them"


def _check_dtypes(config: EngineCoreConfig, checkpoint_dtype: str, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)

    def check(setting: str, value: str, dtype: str, needed: tuple[int, int], mend: str) -> None:
        if capability < needed:
            raise ValueError(
                f"{setting} is {value}, but GPU {device.index} ({torch.cuda.get_device_name(device)}) has compute "
                f"capability {capability[0]}.{capability[1]}, and {dtype} needs {needed[0]}.{needed[1]}; {mend}"
            )

    dtype, is_auto = config.model.dtype, config.model.dtype == "auto"
    if (checkpoint_dtype if is_auto else dtype) == "bfloat16":
        value = f"{dtype!r}{' (the checkpoint has bfloat16)' if is_auto else ''}"
        check("dtype", value, "bfloat16", BFLOAT16_COMPUTE_CAPABILITY, "set dtype to 'float16'")
    settings = {"quantization": config.model.quantization, "kv_cache_dtype": config.cache.kv_cache_dtype}
    for setting in (name for name, value in settings.items() if value == "fp8"):
        check(setting, "'fp8'", "fp8", FP8_COMPUTE_CAPABILITY, "leave it unset")
