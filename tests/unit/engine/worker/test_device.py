"""Which device a rank gets. What torch says of GPUs is set here: so all of it is tested where there are none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.config import EngineConfig
from quire_engine.device.placement import on_device, prepare_device, rank_device
from quire_engine.errors import EngineDeadError
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_kernels import cpu

SECOND_REPLICA = {"data_parallel_size": 2}
"""Of two; the last one is looked at."""


def config(**settings: Any) -> EngineConfig:
    found = EngineConfig.from_settings({"model": "/m", **settings})
    return found.for_replica(found.parallel.data_parallel_size - 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch find so many GPUs, of one kind."""

    def find(number: int, capability: tuple[int, int] = (9, 0), is_built: bool = True) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary")
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return find


@pytest.mark.parametrize(
    ("number", "settings", "devices"),
    [
        (0, {}, ["cpu"]),
        (1, {}, ["cuda:0"]),
        (4, {"tensor_parallel_size": 2}, ["cuda:0", "cuda:1"]),
        (4, {"tensor_parallel_size": 2, "device": "cpu"}, ["cpu", "cpu"]),
        (4, {"tensor_parallel_size": 2, "device": "cuda"}, ["cuda:0", "cuda:1"]),
        (4, {"tensor_parallel_size": 2, "gpu_device_ids": [3, 1]}, ["cuda:3", "cuda:1"]),
        (4, {"pipeline_parallel_size": 2, "gpu_device_ids": [2, 0], "device": "cuda"}, ["cuda:2", "cuda:0"]),
        (4, {"tensor_parallel_size": 2, **SECOND_REPLICA}, ["cuda:2", "cuda:3"]),
        (4, {"tensor_parallel_size": 2, "gpu_device_ids": [3, 2, 1, 0], **SECOND_REPLICA}, ["cuda:1", "cuda:0"]),
    ],
)
def test_each_rank_has_its_device(
    number: int, settings: dict[str, Any], devices: list[str], gpus: Callable[..., None]
) -> None:
    gpus(number)
    found = [rank_device(config(**settings), rank) for rank in range(len(devices))]
    assert found == [torch.device(name) for name in devices]


def test_forced_kernels_of_the_cpu_decide_nothing(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.KERNELS_VARIABLE, "torch")
    gpus(1)
    assert rank_device(config(), 0).type == "cuda"


@pytest.mark.parametrize(
    ("number", "is_built", "settings", "rank", "message"),
    [
        (0, False, {"device": "cuda"}, 0, f"device is 'cuda', but torch {torch.__version__} has no CUDA; install a "
         "CUDA build of torch, or set device to 'cpu'"),
        (0, False, {"gpu_device_ids": [0]}, 0, f"gpu_device_ids is [0], but torch {torch.__version__} has no CUDA"),
        (0, True, {"device": "cuda"}, 0, "device is 'cuda', but torch finds no GPU; see what `quire doctor` says"),
        (2, True, {"gpu_device_ids": [0, 3], "tensor_parallel_size": 2}, 1,
         "gpu_device_ids names GPU 3 for rank 1; there are 2 (0 to 1)"),
        (1, True, {"gpu_device_ids": [1]}, 0, "gpu_device_ids names GPU 1 for rank 0; there is 1 (0)"),
        (1, True, {"tensor_parallel_size": 2}, 1, "device is 'auto', which takes a GPU for each of 2 ranks; there is 1 "
         "(0): use fewer ranks, or set device to 'cpu'"),
    ],
)  # fmt: skip
def test_a_device_that_is_not_there_is_named_with_its_mend(
    number: int, is_built: bool, settings: dict[str, Any], rank: int, message: str, gpus: Callable[..., None]
) -> None:
    gpus(number, is_built=is_built)
    with pytest.raises(ValueError, match=r"GPU|CUDA") as error:
        rank_device(config(**settings), rank)
    assert str(error.value).startswith(message)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="of a torch without CUDA")
def test_torch_without_cuda_computes_on_the_cpu_alone() -> None:
    assert rank_device(config(), 0) == torch.device("cpu")
    with pytest.raises(ValueError, match="has no CUDA"):
        rank_device(config(device="cuda"), 0)


@pytest.mark.parametrize(
    ("capability", "settings", "refused"),
    [
        ((7, 5), {"dtype": "bfloat16"}, "dtype is 'bfloat16', but GPU 0 (Imaginary) has compute capability 7.5, "
         "and bfloat16 needs 8.0; set dtype to 'float16'"),
        ((7, 5), {}, "dtype is 'auto' (the checkpoint has bfloat16), but GPU 0"),
        ((7, 5), {"dtype": "float16"}, None),
        ((7, 5), {"dtype": "float32"}, None),
        ((8, 0), {"dtype": "bfloat16"}, None),
        ((8, 0), {"quantization": "int8"}, None),
        ((8, 0), {"quantization": "fp8"}, "quantization is 'fp8', but GPU 0 (Imaginary) has compute capability 8.0, "
         "and fp8 needs 8.9; leave it unset"),
        ((8, 0), {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8', but GPU 0"),
        ((8, 9), {"quantization": "fp8", "kv_cache_dtype": "fp8"}, None),
    ],
)  # fmt: skip
def test_a_gpu_without_a_dtype_refuses_it(
    capability: tuple[int, int],
    settings: dict[str, str],
    refused: str | None,
    gpus: Callable[..., None],
    checkpoint: Callable[[str], Path],
) -> None:
    gpus(1, capability)
    read = replace(CheckpointConfig.from_folder(checkpoint("tied-gqa")), dtype="bfloat16")
    if refused is None:
        assert prepare_device(config(**settings), read.dtype, 0) == torch.device("cuda", 0)
    else:
        with pytest.raises(ValueError, match="compute capability") as error:
            prepare_device(config(**settings), read.dtype, 0)
        assert str(error.value).startswith(refused)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for it."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), True),
        (torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (KeyError("CUDA error"), False),
    ],
)
def test_an_error_after_which_a_device_is_of_no_use_is_the_engines_end(error: Exception, lost: bool) -> None:
    with pytest.raises(EngineDeadError if lost else type(error)) as caught, on_device(torch.device("cpu")):
        raise error
    if lost:
        assert str(caught.value).startswith(f"the GPU cannot be used any more: {type(error).__name__}: ")
        assert "\n" not in str(caught.value)
    else:
        assert caught.value is error
