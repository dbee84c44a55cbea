"""The model's inputs and outputs, as one table, and how they complete a `config.pbtxt`.

They include all of vllm_backend's, so its clients run unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_origin

from quire_engine.pooling import HEAD_TASKS, TOKEN_TASKS, PoolingInfo
from quire_engine.sampling_params import PARAMETER_TYPES
from quire_engine.structured_outputs_params import StructuredOutputsParams

METRICS_PARAMETER = "REPORT_CUSTOM_METRICS"
"""A parameter of vllm_backend's, in `config.pbtxt`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. All inputs are optional; `request` checks which ones a request needs."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)


_DATA_TYPES: dict[Any, str] = {
    bool: "TYPE_BOOL",
    int: "TYPE_INT32",
    float: "TYPE_FP32",
    str: "TYPE_STRING",
    StructuredOutputsParams: "TYPE_STRING",
    list[str]: "TYPE_STRING",
    list[int]: "TYPE_INT64",
}
"""Of an input for a sampling parameter, by the parameter's type. Ids are INT64, as tritonserver cuts what it reads from
JSON to the width of the input, silently."""

_WITHOUT_INPUT = ("logit_bias", "output_kind", "priority")


def _sampling_input(parameter: str) -> TensorSpec:
    kind = PARAMETER_TYPES[parameter]
    return TensorSpec(
        "stop_words" if parameter == "stop" else parameter,
        "TYPE_UINT64" if parameter == "seed" else _DATA_TYPES[kind],
        (-1,) if get_origin(kind) is list else (1,),
    )


_SAMPLING_SPECS = {name: _sampling_input(name) for name in PARAMETER_TYPES if name not in _WITHOUT_INPUT}

SAMPLING_INPUTS: dict[str, str] = {spec.name: parameter for parameter, spec in _SAMPLING_SPECS.items()}
"""The input's name → the parameter's name."""

TYPED_INPUTS_OPTION = "typed_inputs"
"""The key among `parameters` of `config.pbtxt` that says whether there is an input for each parameter of one value."""

RETURN_FLAGS: dict[str, str] = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_token_ids": "token_ids",
    "return_perf_metrics": "perf_metrics",
    "return_prompt_logprobs": "prompt_logprobs",
    "return_prompt_token_ids": "prompt_token_ids",
    "return_stop_reason": "stop_reason",
}
"""The input that asks for an additional output → that output."""

INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_input", "TYPE_STRING"),
    TensorSpec("input_ids", "TYPE_INT32", (-1,)),
    TensorSpec("messages", "TYPE_STRING"),
    TensorSpec("prompt_embeds", "TYPE_FP32", (-1, -1)),
    TensorSpec("image", "TYPE_STRING", (-1,)),
    TensorSpec("stream", "TYPE_BOOL"),
    TensorSpec("sampling_parameters", "TYPE_STRING"),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL"),
    *(TensorSpec(name, "TYPE_BOOL") for name in RETURN_FLAGS),
    *(spec for spec in _SAMPLING_SPECS.values() if spec.dims == (-1,)),
)
"""What every model has; sampling parameters that are lists are among it, as Triton takes a list as an input alone."""

TYPED_INPUTS: tuple[TensorSpec, ...] = tuple(spec for spec in _SAMPLING_SPECS.values() if spec.dims == (1,))
"""What a model also has whose `config.pbtxt` asks for it, all of them or single ones: sampling parameters of one value.

tritonserver's `generate` reads a key of the body as the input of that name where the model has one: it then takes
nothing but JSON of the input's type (not "0.5", as clients of vllm_backend send it), cuts integers to the input's
width, and its errors name nothing. A key that is no input becomes a request parameter of any type, and is read here."""

OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_output", "TYPE_STRING", (-1,)),
    TensorSpec("finish_reason", "TYPE_STRING", (-1,)),
    TensorSpec("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorSpec("logprobs", "TYPE_STRING", (-1,)),
    TensorSpec("num_input_tokens", "TYPE_UINT32"),
    TensorSpec("num_output_tokens", "TYPE_UINT32", (-1,)),
    TensorSpec("token_ids", "TYPE_INT32", (-1,)),
    TensorSpec("perf_metrics", "TYPE_STRING"),
    TensorSpec("prompt_logprobs", "TYPE_STRING"),
    TensorSpec("prompt_token_ids", "TYPE_INT32", (-1,)),
    TensorSpec("stop_reason", "TYPE_STRING", (-1,)),
)

POOLING_RETURN_FLAGS = {
    name: RETURN_FLAGS[name] for name in ("return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics")
}
"""Those of `RETURN_FLAGS` that mean something in a request for vectors: each output has an entry per prompt."""

POOLING_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_input", "TYPE_STRING", (-1,)),
    TensorSpec("text_pair", "TYPE_STRING", (-1,)),
    TensorSpec("input_lengths", "TYPE_INT32", (-1,)),
    TensorSpec("embedding_request", "TYPE_STRING"),
    TensorSpec("pooling_parameters", "TYPE_STRING"),
)
"""What a model has besides, or in the place of those above, that turns prompts into vectors."""

POOLING_TYPED_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("dimensions", "TYPE_INT32"),
    TensorSpec("truncate_prompt_tokens", "TYPE_INT32"),
    TensorSpec("normalize", "TYPE_BOOL"),
    TensorSpec("use_activation", "TYPE_BOOL"),
    TensorSpec("pooling_type", "TYPE_STRING"),
    TensorSpec("prompt_name", "TYPE_STRING"),
)
"""Its `TYPED_INPUTS`. `task` stays a request parameter: over HTTP, a body's key of an input's name is no parameter, and
requests to tokenize have a `task`, too."""


def _pooling_outputs(info: PoolingInfo) -> list[TensorSpec]:
    """By what the model can do. Scores of a model that embeds are similarities."""
    offers = {
        "embeddings": any(task not in HEAD_TASKS for task in info.tasks),
        "scores": True,
        "num_rows": any(task in TOKEN_TASKS for task in info.tasks),
        "labels": bool(info.labels),
    }
    types = {"num_rows": "TYPE_UINT32", "labels": "TYPE_STRING"}
    specs = [TensorSpec(name, types.get(name, "TYPE_FP32"), (-1,) if name in types else (-1, -1))
             for name, is_offered in offers.items() if is_offered]  # fmt: skip
    per_prompt = [TensorSpec(spec.name, spec.data_type, (-1,)) for spec in OUTPUTS
                  if spec.name in POOLING_RETURN_FLAGS.values()]  # fmt: skip
    return [*specs, *per_prompt]


class AutoCompleteConfig(Protocol):
    """The part of `pb_utils.ModelConfig` that is used here."""

    def as_dict(self) -> dict[str, Any]: ...
    def add_input(self, input: dict[str, Any]) -> None: ...
    def add_output(self, output: dict[str, Any]) -> None: ...
    def set_max_batch_size(self, max_batch_size: int) -> None: ...
    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None: ...


def complete(config: AutoCompleteConfig, info: PoolingInfo | None = None) -> None:
    """Add what `config.pbtxt` leaves out.

    What it declares is kept: a declared `text_input` need not say `optional`, and keeps its dims.

    Args:
        config: the server's.
        info: what the model offers besides generation; None: nothing, or that is not known.

    Raises:
        ValueError: it declares a tensor with another type, a batch size, a transaction policy that is not decoupled, or
            an option with an unknown value.
    """
    declared = config.as_dict()
    if declared.get("max_batch_size"):
        raise ValueError(f"max_batch_size is {declared['max_batch_size']}; it must be 0, the engine does the batching")
    inputs = {item["name"]: item for item in declared.get("input", [])}
    outputs = {item["name"]: item for item in declared.get("output", [])}
    is_pooled = info is not None and bool(info.tasks)
    offered = _by_name(*TYPED_INPUTS, *(POOLING_TYPED_INPUTS if is_pooled else ()))
    wants_typed = _wants_typed_inputs(declared)
    typed = [spec for spec in offered.values() if wants_typed or spec.name in inputs]
    for spec in _by_name(*INPUTS, *(POOLING_INPUTS if is_pooled else ()), *typed).values():
        config.add_input(_property(spec, inputs.get(spec.name), optional=True))
    for spec in _by_name(*OUTPUTS, *(_pooling_outputs(info) if info is not None and is_pooled else ())).values():
        config.add_output(_property(spec, outputs.get(spec.name)))
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})


def _by_name(*specs: TensorSpec) -> dict[str, TensorSpec]:
    """The last one of each name."""
    return {spec.name: spec for spec in specs}


def _wants_typed_inputs(declared: dict[str, Any]) -> bool:
    value = declared.get("parameters", {}).get(TYPED_INPUTS_OPTION, {}).get("string_value", "false")
    if value not in ("true", "false"):
        raise ValueError(f'the parameter {TYPED_INPUTS_OPTION} is {value!r}; it must be "true" or "false"')
    return bool(value == "true")


def reports_metrics(config: Mapping[str, Any]) -> bool:
    """Whether the model has custom metrics, according to `config.pbtxt`. Unlike in vllm_backend, the default is yes.

    Args:
        config: the model's configuration.

    Raises:
        ValueError: the parameter means neither yes nor no.
    """
    value = config.get("parameters", {}).get(METRICS_PARAMETER, {}).get("string_value", "true")
    wanted = {"true": True, "yes": True, "false": False, "no": False}.get(value.strip().lower())
    if wanted is None:
        raise ValueError(f"parameter {METRICS_PARAMETER} of config.pbtxt is {value!r}; it must be true or false")
    return wanted


def num_instances(config: Mapping[str, Any]) -> int:
    """How many instances of the model are loaded together; `count` of a group with GPUs is per GPU."""
    groups = config.get("instance_group") or [{}]
    return sum(group.get("count", 1) * max(1, len(group.get("gpus") or ())) for group in groups)


def _property(spec: TensorSpec, declared: dict[str, Any] | None, **own: bool) -> dict[str, Any]:
    """The tensor in Triton's form; if `config.pbtxt` declares it, with the dims and `optional` from there."""
    wanted = {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims), **own}
    if declared is None:
        return wanted
    return wanted | {name: declared[name] for name in ("dims", *own) if declared.get(name) not in (None, [])}
