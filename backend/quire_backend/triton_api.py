"""The only user of `triton_python_backend_utils`, a module that exists only inside tritonserver's Python stub."""

import enum
import json
import logging
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from quire_engine.errors import RequestError
from quire_engine.system.log_lines import LineFormatter
from quire_monitoring.definitions import MetricDefinition, MetricKind
from quire_monitoring.triton import MetricFamily

_SPARE_BYTES = 4 << 20
"""For what else is on its way, and as a region grows in steps."""

_SLICE_BYTES = 1 << 20


class ErrorCode(enum.Enum):
    """The kinds of error that a client can get."""

    INVALID_ARG = "INVALID_ARG"
    """The request is invalid and would fail again."""
    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"
    """It may succeed later or elsewhere."""
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"
    """An error in this backend."""


class Tensor(Protocol):
    """An input tensor of a request."""

    def name(self) -> str:
        """The input's name."""

    def as_numpy(self) -> npt.NDArray[Any]:
        """Its values; BYTES as an array of `bytes` objects."""


class ResponseSender(Protocol):
    """Sends the responses to one request."""

    def send(self, response: Any = ..., flags: int = ...) -> None:
        """Send a response; blocks for a round trip to the server process."""

    def is_cancelled(self) -> bool:
        """Whether the client has disconnected or cancelled. Never call it once the final response is being sent."""


class TritonRequest(Protocol):
    """One inference request, as passed to `execute`."""

    def inputs(self) -> list[Tensor]:
        """The inputs that were sent."""

    def parameters(self) -> str:
        """The request parameters as a JSON object."""

    def request_id(self) -> str:
        """The client's request id, which need not be unique."""

    def timeout(self) -> int:
        """The client's timeout in microseconds; 0: none."""

    def trace(self) -> Any:
        """The server's trace of it; not in servers before 24.02."""

    def get_response_sender(self) -> ResponseSender:
        """What sends its responses."""


def request_parameters(request: TritonRequest) -> str:
    """The request parameters as a JSON object, or nothing.

    Raises:
        RequestError: they are not UTF-8, which tritonserver does not check.
    """
    try:
        return request.parameters()
    except UnicodeDecodeError:
        raise RequestError("parameters", "parameters: a name or a value in them is not valid UTF-8") from None


MOST_LABEL_CHARACTERS = 256
"""It is kept as long as the request lives, and is part of every snapshot and trace."""


def request_id(request: TritonRequest) -> str:
    """The client's request id; the beginning and an ellipsis if it is too long.

    Raises:
        RequestError: it is not UTF-8.
    """
    try:
        label = request.request_id()
        return label if len(label) <= MOST_LABEL_CHARACTERS else f"{label[: MOST_LABEL_CHARACTERS - 1]}…"
    except UnicodeDecodeError:
        raise RequestError("id", "id is not valid UTF-8") from None


def trace_context(request: TritonRequest) -> str | None:
    """The `traceparent` of the server's own trace of a request; None if the server does not trace it."""
    try:
        context = request.trace().get_context()
        return json.loads(context)["traceparent"] if context else None
    except Exception:  # an older server, or another kind of trace
        return None


def response(tensors: Mapping[str, npt.NDArray[Any]]) -> Any:
    """A response with these outputs."""
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, array) for name, array in tensors.items()])


def error_response(code: ErrorCode, message: str) -> Any:
    """A response that is an error."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code.value)))


def send(sender: ResponseSender, message: Any, *, final: bool) -> None:
    """Send one response, the last one with the flag that ends the request; None is the flag alone."""
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
    if message is None:
        sender.send(flags=flags)
    else:
        sender.send(message, flags=flags)


def has_room(num_bytes: int) -> bool:
    """Whether a response surely fits into the stub's shared memory, which grows as long as /dev/shm has room."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return False
    return room.f_bavail * room.f_frsize > 2 * num_bytes + _SPARE_BYTES


def model_folder() -> Path:
    """The folder of the model's version, with its `model.json`."""
    return Path(pb_utils.get_model_dir())


def load_error(message: str) -> Exception:
    """What to raise from `initialize` so that tritonserver reports `message` as the reason."""
    error: Exception = pb_utils.TritonModelException(message)
    return error


def metric_family(definition: MetricDefinition) -> MetricFamily | None:
    """Register a family of custom metrics with the server; None when it is too old for metrics of this kind."""
    kinds = {
        MetricKind.GAUGE: pb_utils.MetricFamily.GAUGE,
        MetricKind.COUNTER: pb_utils.MetricFamily.COUNTER,
        MetricKind.HISTOGRAM: getattr(pb_utils.MetricFamily, "HISTOGRAM", None),
    }
    kind = kinds[definition.kind]
    if kind is None:
        return None
    family: MetricFamily = pb_utils.MetricFamily(name=definition.name, description=definition.help, kind=kind)
    return family


class _TritonLogHandler(logging.Handler):
    """Passes the packages' log records on to the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        log = pb_utils.Logger
        if record.levelno >= logging.ERROR:
            log.log_error(self.format(record))
        elif record.levelno >= logging.WARNING:
            log.log_warn(self.format(record))
        elif record.levelno >= logging.INFO:
            log.log_info(self.format(record))
        else:
            log.log_verbose(self.format(record))


def install_log_handler() -> None:
    """Pass the log records of Quire's packages to the server's log. Those of other packages go to stderr."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())
    for name in ("quire_backend", "quire_monitoring", "quire_engine"):
        package_logger = logging.getLogger(name)
        if not package_logger.handlers:
            handler = _TritonLogHandler()
            handler.setFormatter(LineFormatter())
            package_logger.addHandler(handler)
            # The backend's own debug lines are the server's verbose ones: whether they appear is its `--log-verbose`.
            package_logger.setLevel(logging.DEBUG if name == "quire_backend" else logging.INFO)
            package_logger.propagate = False


def strings(values: list[str]) -> npt.NDArray[np.object_]:
    """A BYTES tensor's array."""
    return byte_strings([value.encode("utf-8") for value in values])


def byte_strings(values: list[bytes]) -> npt.NDArray[np.object_]:
    """The same of what is encoded already."""
    array = np.empty(len(values), dtype=np.object_)  # from a list, numpy would measure and copy them first
    array[:] = values
    return array


def install_serializer() -> None:
    """Have the stub copy large BYTES tensors once and in slices, between which other threads run.

    Its own function joins them, and numpy copies the result again: for 80 MB a second on a busy machine, without a
    moment for any other thread. Both return what the function's documentation says: a flat array of uint8.
    """
    serialize = pb_utils.serialize_byte_tensor
    pb_utils.serialize_byte_tensor = lambda array: serialize_in_slices(array, serialize)


def serialize_in_slices(array: npt.NDArray[Any], otherwise: Callable[[npt.NDArray[Any]], Any]) -> Any:
    """The elements of a BYTES tensor, each after its length (uint32); small ones as `otherwise` does it."""
    items = array.reshape(-1).tolist()
    if array.dtype != np.object_ or not all(type(item) is bytes for item in items):
        return otherwise(array)
    num_bytes = sum(map(len, items)) + 4 * len(items)
    if num_bytes <= _SLICE_BYTES:
        return otherwise(array)
    flat = np.empty(num_bytes, np.uint8)
    target, at = flat.data, 0
    for item in items:
        struct.pack_into("<I", target, at, len(item))
        at += 4
        for start in range(0, len(item), _SLICE_BYTES):
            part = memoryview(item)[start : start + _SLICE_BYTES]
            target[at : at + len(part)] = part
            at += len(part)
    return flat
