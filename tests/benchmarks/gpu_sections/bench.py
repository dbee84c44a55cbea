"""What all sections measure with: the device, a clock for kernels, and the machine's roofline."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from harness.roofline import Ceilings

__all__ = ["Bench", "Roofline"]

CACHE_BYTES = 256 << 20
"""Several times the L2 cache of any GPU: whatever a kernel reads comes from memory if so much was read since."""
MOST_SETS = 256
SPAN_SECONDS = 2e-3
"""Between two events, at least: their clock ticks in half microseconds."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What the device can do at best, as measured."""

    copy_bytes_per_second: float
    """Bytes read and bytes written."""
    read_bytes_per_second: float
    flops_per_second: float
    """In bf16, multiplications and additions."""

    @property
    def ceilings(self) -> Ceilings:
        """For a model's step, which reads far more than it writes."""
        return Ceilings(self.read_bytes_per_second, self.flops_per_second)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The circumstances of a section.

    With `is_smoke` everything is tiny, and the figures mean nothing: to see that the code runs.
    """

    is_smoke: bool
    roofline: Roofline | None = None
    """Measured by the first section."""

    @cached_property
    def device(self) -> torch.device:
        """A GPU; for a smoke test also the CPU."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def machine(self) -> Roofline:
        """The roofline, which there has to be."""
        if self.roofline is None:
            raise RuntimeError("the section roofline has not been measured")
        return self.roofline

    def num_sets(self, num_bytes: int) -> int:
        """How many sets of operands of that size it takes to find none of them in the cache when its turn comes."""
        return 2 if self.is_smoke else max(1, min(MOST_SETS, -(-CACHE_BYTES // num_bytes)))

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Standard normal numbers, on the device."""
        return torch.randn(shape, dtype=dtype, device=self.device)

    def seconds(self, *calls: Callable[[], object]) -> float:
        """Median time of one of these calls, made in turn, on a GPU as a graph: without the gaps between launches."""
        for call in calls:  # kernels are compiled, memory is allocated
            call()
        if self.device.type == "cuda":
            return self._seconds_on_gpu(calls)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - start)
        return statistics.median(times) / len(calls)

    def _seconds_on_gpu(self, calls: tuple[Callable[[], object], ...]) -> float:
        def call_all() -> None:
            for call in calls:
                call()

        repeats = max(1, min(100, round(SPAN_SECONDS / _event_seconds(call_all))))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(repeats):
                    call_all()
            replay, num_calls = graph.replay, repeats * len(calls)
        except RuntimeError as error:
            print(
                f"  timed with its launches, as it cannot be captured: {str(error).partition(chr(10))[0]}", flush=True
            )
            replay, num_calls = call_all, len(calls)
        replay()
        return statistics.median(_event_seconds(replay) for _ in range(3 if self.is_smoke else 15)) / num_calls


def _event_seconds(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
