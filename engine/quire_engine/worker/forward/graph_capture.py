"""How steps are captured as CUDA graphs, and which sizes of them."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["Capture", "CudaCapture", "Function", "capture_sizes", "coarse_to_fine", "run_as_captured"]

Function: TypeAlias = Callable[[], None]
Capture: TypeAlias = Callable[[Function], Function]
"""Takes what launches kernels, and returns what launches the same kernels on the same memory again."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: every eighth at most computes an eighth of its rows in vain."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 16, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def coarse_to_fine(size: int) -> tuple[bool, int, int]:
    """Order of sizes of which the first few are spread over all of them: powers of two, their halves between, …"""
    step = size & -size
    return step != size, -step, -size


def run_as_captured(function: Function) -> Function:
    """A `Capture` where there is nothing to capture with: each replay runs the function, on the same memory."""
    return function


class CudaCapture:
    """A `Capture` by CUDA graphs, which share their memory: torch takes no more into it once all of them are gone."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Function) -> Function:
        """Run the function once, which compiles kernels and lets libraries set themselves up, and then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            function()
            torch.cuda.synchronize()
            # What other threads do meanwhile, such as NCCL's watchdog, is not to be captured and does no harm.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all that is ever captured: cuBLAS keeps memory for each stream that it was used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
