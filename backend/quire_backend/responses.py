"""Outputs of the engine as tensors."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from quire_engine.outputs import CompletionOutput, RequestOutput

from quire_backend.request import ResponseOptions
from quire_backend.triton_api import ErrorCode, byte_strings, strings

if TYPE_CHECKING:
    from quire_engine.outputs import Logprob
    from quire_engine.stats import FinishedRequestStats

MAX_RESPONSE_BYTES = 256 << 20
"""About how many bytes may be sent for one request: what its client does not read waits in the server's memory."""
BYTES_PER_LOGPROB = 64
"""As JSON, about: a token's id, text, log-probability and rank."""
CANCELLED = (ErrorCode.CANCELLED, "the request was cancelled")
_ENCODE = msgspec.json.Encoder().encode
LOWEST_LOGPROB = -9999.0
"""Used for minus infinity and NaN, which JSON does not have; the value is vLLM's."""


def tensors_of(output: RequestOutput, options: ResponseOptions) -> dict[str, npt.NDArray[Any]]:
    """The outputs of one response.

    Args:
        output: the delta since the last response; everything, when the request does not stream.
        options: what the request asked for.
    """
    encode_logprobs(output, options)
    completions = _by_index(output, options.num_sequences)
    prefix = output.prompt or "" if options.prepend_prompt else ""
    tensors: dict[str, npt.NDArray[Any]] = {"text_output": strings([prefix + item.text for item in completions])}
    if options.outputs:
        tensors.update(_additional(output, completions, options))
    return tensors


def answer_of(text: str) -> RequestOutput:
    """A single response with a text that was not generated."""
    return RequestOutput("", None, [], [CompletionOutput(text=text)], finished=True)


def _by_index(output: RequestOutput, num_sequences: int) -> list["CompletionOutput"]:
    """One entry per sequence, in order; an empty one for those without anything new."""
    if len(output.outputs) == num_sequences:
        return output.outputs
    new = {completion.index: completion for completion in output.outputs}
    return [new.get(index) or CompletionOutput(index) for index in range(num_sequences)]


def _additional(
    output: RequestOutput, completions: Sequence["CompletionOutput"], options: ResponseOptions
) -> dict[str, npt.NDArray[Any]]:
    wanted = options.outputs
    tensors: dict[str, npt.NDArray[Any]] = {}
    if "finish_reason" in wanted:
        # "None" until it is known, as in vllm_backend.
        tensors["finish_reason"] = strings([str(item.finish_reason) for item in completions])
    if "cumulative_logprob" in wanted:
        sums = [float("nan") if item.cumulative_logprob is None else item.cumulative_logprob for item in completions]
        tensors["cumulative_logprob"] = np.array(sums, dtype=np.float32)
    if "logprobs" in wanted:
        tensors["logprobs"] = byte_strings([_ENCODE(item.logprobs) for item in completions])
    if "num_input_tokens" in wanted:
        tensors["num_input_tokens"] = np.array([len(output.prompt_token_ids)], dtype=np.uint32)
    if "num_output_tokens" in wanted:
        tensors["num_output_tokens"] = np.array([len(item.token_ids) for item in completions], dtype=np.uint32)
    if "token_ids" in wanted:
        tensors["token_ids"] = np.array([id_ for item in completions for id_ in item.token_ids], dtype=np.int32)
    if "prompt_token_ids" in wanted:
        tensors["prompt_token_ids"] = np.array(output.prompt_token_ids if output.is_first else [], dtype=np.int32)
    if "stop_reason" in wanted:
        tensors["stop_reason"] = strings([json.dumps(item.stop_reason) for item in completions])
    if "perf_metrics" in wanted:
        tensors["perf_metrics"] = strings(
            [perf_metrics(output.metrics, report_cached_tokens=options.report_cached_tokens)]
        )
    if "prompt_logprobs" in wanted:
        positions = output.prompt_logprobs  # not JSON before: they come at once, and are as many as the prompt is long
        tensors["prompt_logprobs"] = byte_strings([_ENCODE(None if positions is None else _encoded(positions))])
    return tensors


def encode_logprobs(output: RequestOutput, options: ResponseOptions) -> int:
    """Turn each new token's log-probabilities into JSON: one object, token id → logprob, rank and text.

    An answer may hold a million of them. As JSON they take a quarter of the memory, no garbage collection walks them,
    and in the end there is nothing left to do but to join them. Those that no response shows are dropped. Idempotent.

    Returns:
        How many bytes they take, and those of the prompt will take about.
    """
    shown: list[Any] = []
    for item in output.outputs:
        item.logprobs = _encoded(item.logprobs) if options.shows_logprobs and item.logprobs else None
        shown += item.logprobs or ()
    num_bytes = sum(map(len, shown))
    if output.prompt_logprobs is not None:
        if "prompt_logprobs" in options.outputs:
            num_bytes += BYTES_PER_LOGPROB * len(output.prompt_logprobs) * len(output.prompt_logprobs[-1] or ())
        else:
            output.prompt_logprobs = None
    return num_bytes


def _encoded(positions: "Sequence[dict[int, Logprob] | None]") -> Any:
    return positions if isinstance(positions[0], msgspec.Raw) else [_position(position) for position in positions]


def _position(position: "dict[int, Logprob] | None") -> msgspec.Raw:
    for item in position.values() if position else ():
        if not item.logprob > LOWEST_LOGPROB:  # NaN is above nothing
            item.logprob = LOWEST_LOGPROB
    return msgspec.Raw(_ENCODE(position))


def num_bytes_of(tensors: dict[str, npt.NDArray[Any]]) -> int:
    """How many bytes they take in the server, about."""
    return sum(
        sum(map(len, array.tolist())) if array.dtype == np.object_ else array.nbytes for array in tensors.values()
    )


_NOT_TOLD = {
    "options", "request_id", "params", "prompt", "error", "aborted_by",  # the client knows them
    "is_streamed", "missed_live",
    "num_running_before", "num_waiting_before", "prefill_chunks",  # are about others
}  # fmt: skip


def perf_metrics(metrics: "FinishedRequestStats | None", *, report_cached_tokens: bool) -> str:
    """The request's times and counts as a JSON object, "null" before its end.

    Args:
        metrics: its statistics.
        report_cached_tokens: the setting of that name.
    """
    if metrics is None:
        return "null"
    values = {
        name: msgspec.to_builtins(getattr(metrics, name)) for name in metrics.__struct_fields__ if name not in _NOT_TOLD
    }
    values["slo_class"] = metrics.options.slo.slo_class
    values["acceptance_length"] = metrics.acceptance_length
    values |= {f"{phase}_seconds": seconds for phase, seconds in metrics.phase_seconds.items()}
    if not report_cached_tokens:  # what was cached, and what was drafted, may be what others sent and got
        for name in ("num_cached_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_length"):
            values[name] = None
    values["time_per_output_token_seconds"] = metrics.time_per_output_token_seconds
    return json.dumps(values)


def failure_of(output: RequestOutput, *, cancelled: bool, draining: bool) -> tuple[ErrorCode, str] | None:
    """The error that a request ended with; None when it ended well.

    Args:
        output: the request's last output.
        cancelled: the client asked for the end.
        draining: the request was aborted because the model is being unloaded.
    """
    reasons = {item.finish_reason for item in output.outputs}
    if output.error is not None and output.error_parameter is not None:
        return ErrorCode.INVALID_ARG, output.error
    if output.error is not None and output.error_code is not None:
        return ErrorCode.UNAVAILABLE, output.error
    if output.error is not None or "error" in reasons:
        return ErrorCode.INTERNAL, output.error or "the engine failed this request"
    if "abort" in reasons:
        if draining and not cancelled:
            return ErrorCode.UNAVAILABLE, "the model is being unloaded; send the request elsewhere or again later"
        return CANCELLED
    return None
