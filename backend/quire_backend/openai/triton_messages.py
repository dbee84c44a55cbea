"""Requests and responses of tritonserver's gRPC, as the messages that they travel in.

There is a response for every token or so of every stream, so reading one has to be cheap.
"""

import array
import itertools
import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

Prompt = str | list[int] | Mapping[str, Any] | npt.NDArray[np.float32]
"""Text, token ids, a conversation (the model's input `messages` as an object), or hidden states, [tokens, E]."""

_SIZE = struct.Struct("<I")
_UNFINISHED = b"\x04\x00\x00\x00None"
"""A finish reason, of one sequence, that is not known yet."""
_NOTHING = b"\x04\x00\x00\x00null"
_DECODE = msgspec.json.decode
_POSITIONS = msgspec.json.Decoder(list[msgspec.Raw] | None).decode
_POSITION = msgspec.json.Decoder(dict[str, Any]).decode


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """One response of the model. Lists have one entry per sequence."""

    texts: list[str]
    finish_reasons: list[str | None]
    num_output_tokens: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int | None
    """Of the prompt; known at the end, and if the model tells it."""
    logprobs: list[list[msgspec.Raw] | None]
    """Per new token, as JSON: token id → log-probability, the sampled token's first. An answer may hold millions of
    them; each position is read when it is turned into a part of the answer."""
    prompt_logprobs: list[msgspec.Raw] | None
    """Per token of the prompt; null for the first one."""
    token_ids: list[list[int]] | None = None
    """New ones, if they were asked for."""
    prompt_token_ids: list[int] | None = None
    """Once, if they were asked for."""
    stop_reasons: list[str | int | None] | None = None
    """The stop string or token that ended the text, if they were asked for."""
    prompt_text: str | None = None
    """The gateway's own, of an answer that repeats the prompt."""
    first_token: str | None = None
    """The gateway's own, as well: the text of the prompt's first token."""
    num_bytes: int = 0
    """Of the response that it came in."""


def generation_request(
    model: str, prompt: Prompt, sampling: Mapping[str, Any], stream: bool, request_id: str, response_id: str,
    outputs: Iterable[str] = (),
) -> Any:  # fmt: skip
    """A request that generates.

    Args:
        model: its name.
        prompt: see `Prompt`.
        sampling: the model's sampling parameters.
        stream: many responses, or one with everything.
        request_id: the client's name for it.
        response_id: the name of the answer.
        outputs: names of outputs besides those that every answer needs.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["response_id"].string_param = response_id
    add_prompt(request, prompt)
    _add_text(request, "sampling_parameters", json.dumps(sampling, ensure_ascii=False))
    flags = ["exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens",
             "return_perf_metrics"]  # fmt: skip
    flags += ["stream"] if stream else []
    flags += ["return_logprobs"] if "logprobs" in sampling else []
    flags += ["return_prompt_logprobs"] if "prompt_logprobs" in sampling else []
    flags += [f"return_{name}" for name in outputs]
    for name in flags:
        _add(request, name, "BOOL", [1], b"\1")
    return request


def add_prompt(request: Any, prompt: Prompt) -> None:
    """Put a prompt into the input that is of its kind."""
    if isinstance(prompt, str):
        _add_text(request, "text_input", prompt)
    elif isinstance(prompt, Mapping):
        _add_text(request, "messages", json.dumps(prompt, ensure_ascii=False))
    elif isinstance(prompt, np.ndarray):
        _add(request, "prompt_embeds", "FP32", prompt.shape, prompt.astype("<f4", copy=False).tobytes())
    else:
        ids = array.array("i", prompt)
        if sys.byteorder == "big":
            ids.byteswap()
        _add(request, "input_ids", "INT32", [len(ids)], ids.tobytes())


def _add_text(request: Any, name: str, text: str) -> None:
    content = text.encode()
    _add(request, name, "BYTES", [1], struct.pack("<I", len(content)) + content)


def _add(request: Any, name: str, datatype: str, shape: Sequence[int], content: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(content)


def texts_of(response: Any) -> list[str]:
    """The model's output `text_output`; empty if the response has none."""
    content = contents_of(response).get("text_output")
    return [] if content is None else _texts(content)


def delta_of(contents: Mapping[str, bytes]) -> Delta:
    """What a response to `generation_request` says.

    Args:
        contents: its outputs.
    """
    texts, reasons = _texts(contents["text_output"]), contents["finish_reason"]
    metrics = None if contents["perf_metrics"] == _NOTHING else _DECODE(_texts(contents["perf_metrics"])[0])
    logprobs, prompt_logprobs = contents.get("logprobs"), contents.get("prompt_logprobs")
    token_ids, prompt_token_ids = contents.get("token_ids"), contents.get("prompt_token_ids")
    stop_reasons = contents.get("stop_reason")
    num_output_tokens = _numbers(contents["num_output_tokens"])
    return Delta(
        texts=texts,
        finish_reasons=[None] if reasons == _UNFINISHED else [
            None if reason == "None" else reason for reason in _texts(reasons)
        ],
        num_output_tokens=num_output_tokens,
        num_prompt_tokens=_numbers(contents["num_input_tokens"])[0],
        num_cached_tokens=metrics.get("num_cached_tokens") if metrics else None,
        logprobs=[None] * len(texts) if logprobs is None else [_POSITIONS(text) for text in _texts(logprobs)],
        prompt_logprobs=None if prompt_logprobs is None else _POSITIONS(_texts(prompt_logprobs)[0]),
        token_ids=None if token_ids is None else _split(_numbers(token_ids), num_output_tokens),
        prompt_token_ids=_numbers(prompt_token_ids) if prompt_token_ids else None,
        stop_reasons=None if stop_reasons is None else [_DECODE(text) for text in _texts(stop_reasons)],
        num_bytes=sum(map(len, contents.values())),
    )  # fmt: skip


def position_of(text: msgspec.Raw) -> dict[str, Any]:
    """The log-probabilities at one position."""
    return _POSITION(text)


def contents_of(response: Any) -> dict[str, bytes]:
    """Each output of a response, as it came."""
    return {
        output.name: content for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _texts(content: bytes) -> list[str]:
    texts, position = [], 0
    while position < len(content):
        (size,) = _SIZE.unpack_from(content, position)
        position += 4 + size
        texts.append(str(content[position - size : position], "utf-8"))
    return texts


def _numbers(content: bytes) -> list[int]:
    """All outputs of numbers that are asked for are UINT32, or ids, which are not negative."""
    return [number for (number,) in _SIZE.iter_unpack(content)]


def _split(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Those of all sequences, by sequence."""
    rest = iter(token_ids)
    return [list(itertools.islice(rest, size)) for size in sizes]
