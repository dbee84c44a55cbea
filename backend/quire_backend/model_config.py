"""The model's inputs and outputs, as one table, and how they complete a `config.pbtxt`.

They are a superset of vllm_backend's, so that its clients run unchanged.
"""

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["INPUTS", "OUTPUTS", "RETURN_FLAGS", "SAMPLING_INPUTS", "TensorSpec", "complete"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output; all inputs are optional, and `request` says what must come together."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)


SAMPLING_INPUTS: dict[str, str] = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop_words": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens",
    "logprobs": "logprobs",
}
"""Typed form of a sampling parameter: the input's name → the parameter's name."""

RETURN_FLAGS: dict[str, str] = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_token_ids": "token_ids",
    "return_perf_metrics": "perf_metrics",
}
"""The input that asks for an additional output → that output."""

INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_input", "TYPE_STRING"),
    TensorSpec("input_ids", "TYPE_INT32", (-1,)),
    TensorSpec("stream", "TYPE_BOOL"),
    TensorSpec("sampling_parameters", "TYPE_STRING"),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL"),
    *(TensorSpec(name, "TYPE_BOOL") for name in RETURN_FLAGS),
    TensorSpec("max_tokens", "TYPE_INT32"),
    TensorSpec("min_tokens", "TYPE_INT32"),
    TensorSpec("temperature", "TYPE_FP32"),
    TensorSpec("top_p", "TYPE_FP32"),
    TensorSpec("top_k", "TYPE_INT32"),
    TensorSpec("min_p", "TYPE_FP32"),
    TensorSpec("seed", "TYPE_UINT64"),
    TensorSpec("stop_words", "TYPE_STRING", (-1,)),
    TensorSpec("stop_token_ids", "TYPE_INT32", (-1,)),
    TensorSpec("ignore_eos", "TYPE_BOOL"),
    TensorSpec("include_stop_str_in_output", "TYPE_BOOL"),
    TensorSpec("skip_special_tokens", "TYPE_BOOL"),
    TensorSpec("logprobs", "TYPE_INT32"),
)

OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_output", "TYPE_STRING", (-1,)),
    TensorSpec("finish_reason", "TYPE_STRING", (-1,)),
    TensorSpec("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorSpec("logprobs", "TYPE_STRING", (-1,)),
    TensorSpec("num_input_tokens", "TYPE_UINT32"),
    TensorSpec("num_output_tokens", "TYPE_UINT32", (-1,)),
    TensorSpec("token_ids", "TYPE_INT32", (-1,)),
    TensorSpec("perf_metrics", "TYPE_STRING"),
)


class AutoCompleteConfig(Protocol):
    """As much of `pb_utils.ModelConfig` as is needed here."""

    def as_dict(self) -> dict[str, Any]: ...
    def add_input(self, input: dict[str, Any]) -> None: ...
    def add_output(self, output: dict[str, Any]) -> None: ...
    def set_max_batch_size(self, max_batch_size: int) -> None: ...
    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None: ...


def complete(config: AutoCompleteConfig) -> None:
    """Add what `config.pbtxt` leaves out.

    What it declares stays as it is: a declared `text_input` need not say `optional`, and keeps its dims.

    Raises:
        ValueError: it declares a tensor with another type, a batch size, or a transaction policy that is not decoupled.
    """
    declared = config.as_dict()
    if declared.get("max_batch_size"):
        raise ValueError(f"max_batch_size is {declared['max_batch_size']}; it must be 0, the engine does the batching")
    inputs = {item["name"]: item for item in declared.get("input", [])}
    outputs = {item["name"]: item for item in declared.get("output", [])}
    for spec in INPUTS:
        config.add_input(_property(spec, inputs.get(spec.name), optional=True))
    for spec in OUTPUTS:
        config.add_output(_property(spec, outputs.get(spec.name)))
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})


def _property(spec: TensorSpec, declared: dict[str, Any] | None, **own: bool) -> dict[str, Any]:
    """The tensor as Triton wants it told; where `config.pbtxt` has it already, with its dims and `optional`."""
    wanted = {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims), **own}
    if declared is None:
        return wanted
    return wanted | {name: declared[name] for name in ("dims", *own) if declared.get(name) not in (None, [])}
