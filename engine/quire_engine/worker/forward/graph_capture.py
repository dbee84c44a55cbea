"""Capturing of steps as CUDA graphs, and the sizes to capture."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["Capture", "CudaCapture", "Function", "capture_sizes", "coarse_to_fine", "run_as_captured"]

Function: TypeAlias = Callable[[], None]
Capture: TypeAlias = Callable[[Function], Function]
"""Takes a function that launches kernels, and returns one that launches the same kernels on the same memory again."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, multiples of 8 up to 256 and of 16 above it, and `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 16, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def coarse_to_fine(size: int) -> tuple[bool, int, int]:
    """Sort key that spreads the first few sizes over the whole range: powers of two, then the midpoints, …"""
    step = size & -size
    return step != size, -step, -size


def run_as_captured(function: Function) -> Function:
    """A `Capture` without CUDA graphs: each replay runs the function, on the same memory."""
    return function


class CudaCapture:
    """A `Capture` with CUDA graphs that share a memory pool. Once all of them are freed, no more can join the pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Function) -> Function:
        """Run the function once, which compiles kernels and initializes libraries, and then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            function()
            torch.cuda.synchronize()
            # Other threads, such as NCCL's watchdog, may use CUDA meanwhile; this neither captures nor forbids it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps memory for each stream that it was used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
