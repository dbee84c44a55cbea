"""The gateway's requests, and what it takes from their responses."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from quire_client import messages
from quire_client.messages import numbers_in, texts_in
from quire_engine.encoders.embeds import ImageEmbeds
from quire_engine.encoders.video import Video

Prompt = str | list[int] | Mapping[str, Any] | npt.NDArray[np.float32]
"""Text, token ids, a conversation (the model's input `messages` as an object, beside it `images`, files in the order
of their places), or hidden states, [tokens, E]."""

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
    flags = ["exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens",
             "return_perf_metrics"]  # fmt: skip
    flags += ["stream"] if stream else []
    flags += ["return_logprobs"] if "logprobs" in sampling else []
    flags += ["return_prompt_logprobs"] if "prompt_logprobs" in sampling else []
    flags += [f"return_{name}" for name in outputs]
    prompt, images = _without_images(prompt)
    return messages.generation_request(
        model, prompt, sampling, flags, images=images, parameters={"response_id": response_id}, request_id=request_id
    )


def task_request(model: str, prompt: Prompt, task: str, parameters: Mapping[str, bool]) -> Any:
    """A request that generates nothing; see `TritonClient.run_task`."""
    inputs = messages.prompt_inputs(*_without_images(prompt))
    return messages.infer_request(model, inputs, {"task": task, **parameters})


def _without_images(prompt: Prompt) -> tuple[Prompt, list[bytes | str]]:
    """A prompt as the model takes it, and its images beside it."""
    if not isinstance(prompt, Mapping):
        return prompt, []
    images = [one.text if isinstance(one, Video | ImageEmbeds) else one for one in prompt.get("images", ())]
    return {name: value for name, value in prompt.items() if name != "images"}, images


def delta_of(contents: Mapping[str, bytes]) -> Delta:
    """What a response to `generation_request` says.

    Args:
        contents: its outputs.
    """
    texts, reasons = texts_in(contents["text_output"]), contents["finish_reason"]
    metrics = None if contents["perf_metrics"] == _NOTHING else _DECODE(texts_in(contents["perf_metrics"])[0])
    logprobs, prompt_logprobs = contents.get("logprobs"), contents.get("prompt_logprobs")
    token_ids, prompt_token_ids = contents.get("token_ids"), contents.get("prompt_token_ids")
    stop_reasons = contents.get("stop_reason")
    num_output_tokens = numbers_in(contents["num_output_tokens"])
    return Delta(
        texts=texts,
        finish_reasons=[None] if reasons == _UNFINISHED else [
            None if reason == "None" else reason for reason in texts_in(reasons)
        ],
        num_output_tokens=num_output_tokens,
        num_prompt_tokens=numbers_in(contents["num_input_tokens"])[0],
        num_cached_tokens=metrics.get("num_cached_tokens") if metrics else None,
        logprobs=[None] * len(texts) if logprobs is None else [_POSITIONS(text) for text in texts_in(logprobs)],
        prompt_logprobs=None if prompt_logprobs is None else _POSITIONS(texts_in(prompt_logprobs)[0]),
        token_ids=None if token_ids is None else _split(numbers_in(token_ids), num_output_tokens),
        prompt_token_ids=numbers_in(prompt_token_ids) if prompt_token_ids else None,
        stop_reasons=None if stop_reasons is None else [_DECODE(text) for text in texts_in(stop_reasons)],
        num_bytes=sum(map(len, contents.values())),
    )  # fmt: skip


def position_of(text: msgspec.Raw) -> dict[str, Any]:
    """The log-probabilities at one position."""
    return _POSITION(text)


def _split(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Those of all sequences, by sequence."""
    rest = iter(token_ids)
    return [list(itertools.islice(rest, size)) for size in sizes]
