"""Rows of blocks in host memory, and how they get there from a GPU: pinned, on a stream of their own.

The memory that processes share is not pinned itself: that would take all of it at once, and seconds at each start of an
engine. What is pinned is what is on its way, which PyTorch keeps for the next rows.
"""

import torch


def empty_rows(num_rows: int, num_bytes: int, is_pinned: bool = False) -> torch.Tensor:
    """[rows, bytes] uint8 on the host, pinned for a GPU.

    Raises:
        MemoryError: there is no memory for them.
    """
    try:
        return torch.empty(num_rows, num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError as error:
        raise MemoryError(str(error)) from None


class HostCopies:
    """Copies rows from their device to the host. `mark` belongs to the thread that computes, `to_host` to another."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def mark(self, rows: torch.Tensor) -> "torch.cuda.Event | None":
        """Where on the present stream the rows are complete; None of rows on the host, which are."""
        if not rows.is_cuda:
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(rows.device))
        return mark

    def to_host(self, rows: torch.Tensor, mark: "torch.cuda.Event | None") -> torch.Tensor:
        """The rows in host memory; waits for them, and holds up nothing else on the GPU."""
        if mark is None:
            return rows
        if self._stream is None:
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            host = empty_rows(len(rows), rows.shape[1], is_pinned=True)
            host.copy_(rows, non_blocking=True)
            end.record(self._stream)
        rows.record_stream(self._stream)
        end.synchronize()
        return host
