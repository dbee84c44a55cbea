"""Triton's gRPC messages of one request: its inputs and parameters as tensors, and the tensors of a response.

There is a response for every token or so of every stream, so reading one has to be cheap.
"""

import array
import base64
import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

Value = str | bool | list[int] | list[str] | npt.NDArray[np.float32]
"""Of an input: texts are BYTES, a flag BOOL, token ids are INT32, and hidden states, [tokens, E], FP32."""

Prompt = str | list[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | npt.NDArray[np.float32]
"""Text, token ids, a conversation of `{"role": …, "content": …}`, that or more as the object which the model's input
`messages` takes, or hidden states, [tokens, E]."""

_SIZE = struct.Struct("<I")


def prompt_input(prompt: Prompt) -> tuple[str, Value]:
    """The input that a prompt goes into, and its value."""
    if isinstance(prompt, str):
        return "text_input", prompt
    if isinstance(prompt, np.ndarray):
        return "prompt_embeds", prompt
    if isinstance(prompt, Mapping) or (prompt and isinstance(prompt[0], Mapping)):
        return "messages", json.dumps(prompt, ensure_ascii=False)
    return "input_ids", cast("list[int]", prompt)


def prompt_inputs(prompt: Prompt, images: Sequence[bytes | str] = ()) -> dict[str, Value]:
    """All inputs that a prompt goes into.

    Args:
        prompt: see `Prompt`.
        images: files, or `data:` URLs of videos, in the order of their places.
    """
    name, value = prompt_input(prompt)
    files = [image if isinstance(image, str) else base64.b64encode(image).decode() for image in images]
    return {name: value, "image": files} if files else {name: value}


def generation_request(
    model: str, prompt: Prompt, sampling: Mapping[str, Any], flags: Iterable[str], *,
    images: Sequence[bytes | str] = (), parameters: Mapping[str, Any] | None = None, request_id: str = "",
) -> Any:  # fmt: skip
    """A request for text.

    Args:
        model: its name.
        prompt: see `Prompt`.
        sampling: the sampling parameters.
        flags: inputs that are true, such as `stream`.
        images: see `prompt_inputs`.
        parameters: the request's own.
        request_id: the client's name for it.
    """
    inputs = prompt_inputs(prompt, images) | {"sampling_parameters": json.dumps(sampling, ensure_ascii=False)}
    return infer_request(model, inputs | dict.fromkeys(flags, True), parameters, request_id)


def infer_request(
    model: str, inputs: Mapping[str, Value], parameters: Mapping[str, Any] | None = None, request_id: str = ""
) -> Any:
    """A request.

    Args:
        model: its name.
        inputs: by name.
        parameters: the request's own, of any type.
        request_id: the client's name for it.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        _add_input(request, name, value)
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


def _add_input(request: Any, name: str, value: Value) -> None:
    shape: Sequence[int] = [1]
    if isinstance(value, str):
        text = value.encode()
        datatype, content = "BYTES", _SIZE.pack(len(text)) + text
    elif isinstance(value, bool):
        datatype, content = "BOOL", bytes([value])
    elif isinstance(value, list) and value and isinstance(value[0], str):
        texts = [text.encode() for text in value]
        datatype, shape = "BYTES", [len(texts)]
        content = b"".join(part for text in texts for part in (_SIZE.pack(len(text)), text))
    elif isinstance(value, list):
        ids = array.array("i", cast("list[int]", value))
        if sys.byteorder == "big":
            ids.byteswap()
        datatype, shape, content = "INT32", [len(ids)], ids.tobytes()
    else:
        datatype, shape, content = "FP32", value.shape, value.astype("<f4", copy=False).tobytes()
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(content)


def outputs_of(response: Any) -> dict[str, list[Any]]:
    """The outputs of a response, those of text and of numbers from 0 on."""
    found: dict[str, list[Any]] = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.datatype == "BYTES":
            found[output.name] = texts_in(content)
        elif output.datatype in ("UINT32", "INT32"):
            found[output.name] = numbers_in(content)
    return found


def contents_of(response: Any) -> dict[str, bytes]:
    """Each output of a response, as it came."""
    return {
        output.name: content for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def is_final(response: Any) -> bool:
    """Whether it is the last one of its request."""
    return bool(response.parameters["triton_final_response"].bool_param)


def texts_in(content: bytes) -> list[str]:
    """The elements of a tensor of BYTES."""
    texts, position = [], 0
    while position < len(content):
        (size,) = _SIZE.unpack_from(content, position)
        position += 4 + size
        texts.append(str(content[position - size : position], "utf-8", "replace"))
    return texts


def numbers_in(content: bytes) -> list[int]:
    """The elements of a tensor of UINT32, or of INT32 if none is negative."""
    return [number for (number,) in _SIZE.iter_unpack(content)]
