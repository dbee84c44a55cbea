"""Triton's gRPC messages of one request: its inputs and parameters as tensors, and the tensors of a response."""

import array
import struct
import sys
from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2


def infer_request(
    model: str, inputs: Mapping[str, str | bool | list[int]], parameters: Mapping[str, Any] | None = None
) -> Any:
    """A request.

    Args:
        model: its name.
        inputs: texts become BYTES, flags BOOL, token ids INT32.
        parameters: the request's own, of any type.
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        if isinstance(value, list):
            ids = array.array("i", value)
            if sys.byteorder == "big":
                ids.byteswap()
            datatype, size, raw = "INT32", len(ids), ids.tobytes()
        elif isinstance(value, bool):
            datatype, size, raw = "BOOL", 1, bytes([value])
        else:
            datatype, size, raw = "BYTES", 1, _packed(value)
        request.inputs.add(name=name, datatype=datatype, shape=[size])
        request.raw_input_contents.append(raw)
    for name, value in (parameters or {}).items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, int):
            request.parameters[name].int64_param = value
        elif isinstance(value, float):
            request.parameters[name].double_param = value
        else:
            request.parameters[name].string_param = str(value)
    return request


def outputs_of(response: Any) -> dict[str, list[Any]]:
    """The tensors of a response, those of text and of UINT32."""
    found: dict[str, list[Any]] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if tensor.datatype == "BYTES":
            found[tensor.name] = _unpacked(raw)
        elif tensor.datatype == "UINT32":
            found[tensor.name] = [value for (value,) in struct.iter_unpack("<I", raw)]
    return found


def _packed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _unpacked(raw: bytes) -> list[str]:
    texts, offset = [], 0
    while offset + 4 <= len(raw):
        (length,) = struct.unpack_from("<I", raw, offset)
        texts.append(raw[offset + 4 : offset + 4 + length].decode("utf-8", errors="replace"))
        offset += 4 + length
    return texts
