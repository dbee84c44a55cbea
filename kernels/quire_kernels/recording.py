"""A step's kernels, recorded once and then run by one call.

Between two kernels Python takes some ten microseconds: to allocate the result, to fill the call, and to enter and leave
the library. A model of 24 layers launches 170 to 270 kernels, which costs 2 ms of a step of 15 ms. CUDA graphs are the
same idea.

::

    with record(64) as recording:          forward's ops record their calls and run nothing:
        out = forward(hidden)
                                            add_rms_norm     linear           rope       …
                                           ┌──────────────┐ ┌──────────────┐ ┌──────────┐
                                           │ hidden, out… │ │ x, weight, … │ │ query, … │
                                           │ rows = 64    │ │ rows = 64    │ │ rows = 64│
                                           └──────────────┘ └──────────────┘ └──────────┘
    hidden[:5] = …
    recording.run(5)                       the same calls, with rows = 5
    out[:5]

All tensors keep their addresses. So a recording can be run with at most as many rows as it was made with, and
everything that differs from step to step is written into tensors that existed when it was made. Calls run in order: a
result that no tensor refers to any more while it is recorded is overwritten by later ones, as in a step op by op. So
many layers take hardly more memory than one, and find their inputs in the cache.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire_kernels.cpu import Call, Kernel, library, recording_to, structure


class NotRecordableError(Exception):
    """The recorded code computes something in torch, which the recording would miss."""


_RecordedCall = structure("RecordedCall")


class Recording:
    """Calls of kernels, in order, recorded with `max_rows` rows. Made by `record`."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._kernels: list[int] = []
        self._calls: list[Call] = []
        self._memory: list[torch.Tensor] = []
        """Bytes of all results."""
        self._unused: dict[int, list[torch.Tensor]] = {}
        """By size, those that no tensor refers to."""
        self._array: ctypes.Array[Call] | None = None

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same new tensor in the recording's memory, which may be that of an earlier one that is gone."""
        if not tensor.nbytes:
            return tensor
        unused = self._unused.setdefault(tensor.nbytes, [])
        if not unused:
            unused.append(tensor.flatten().view(torch.uint8))
            self._memory += unused
        memory = unused.pop()
        array = memory.numpy()  # lives as long as some tensor refers to it
        weakref.finalize(array, unused.append, memory).atexit = False
        return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)

    def add(self, kernel: Kernel, call: Call) -> None:
        """Record a copy of a call. Raises NotRecordableError if its number of rows is not that of the recording."""
        copy = type(call).from_buffer_copy(call)
        rows = getattr(copy, "rows", None)
        if rows is not None and rows != self.max_rows:
            raise NotRecordableError(f"{type(call).__name__} of {rows} rows in a recording of {self.max_rows}")
        self._kernels.append(_address(kernel))
        self._calls.append(copy)
        self._array = None

    @property
    def num_bytes(self) -> int:
        """Memory of the results."""
        return sum(memory.nbytes for memory in self._memory)

    def run(self, rows: int) -> None:
        """Run all calls for the first `rows` rows, at most `max_rows`."""
        assert 0 < rows <= self.max_rows
        if self._array is None:
            calls = zip(self._kernels, self._calls, strict=True)
            self._array = (_RecordedCall * len(self._calls))(
                *(_RecordedCall(kernel, ctypes.addressof(call), _rows_address(call)) for kernel, call in calls)
            )
        handle = library()
        assert handle is not None
        handle.quire_run(self._array, ctypes.c_int64(len(self._array)), ctypes.c_int64(rows))


def _address(kernel: Kernel) -> int:
    address = ctypes.cast(kernel, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


def _rows_address(call: Call) -> int | None:
    rows = getattr(type(call), "rows", None)
    return None if rows is None else ctypes.addressof(call) + int(rows.offset)


class _NothingComputed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch only create tensors, in the memory of a recording, and views of them."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler with the first op: seconds, and 100 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty):
            return self._recording.place(func(*args, **(kwargs or {})))
        raise NotRecordableError(f"{func} cannot be recorded")


@contextlib.contextmanager
def record(max_rows: int) -> Iterator[Recording]:
    """Record the kernels that this thread launches inside the block. Raises NotRecordableError if torch computes
    something inside, or something has another number of rows than `max_rows`."""
    recording = Recording(max_rows)
    with recording_to(recording), _NothingComputed(recording):
        yield recording
