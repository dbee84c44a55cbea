"""Requests for vectors: embeddings, scores and classes. Many prompts in one request, and one response.

::

    text_input [N], or input_ids with input_lengths [N], or messages; text_pair [M]    in
    embeddings or scores, FP32 [rows, D]; num_rows, labels                             out

`embedding_request` is vllm_backend's form of the same: JSON with one prompt, or several, and the embedding as JSON in
`text_output`. The task and its parameters are said as sampling parameters are: in the JSON of `pooling_parameters`, or
as request parameters; conflicting values are rejected.
"""

import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from quire_engine.errors import MAX_QUOTED, RequestError, json_type, quote
from quire_engine.frontend.chat_template import Conversation
from quire_engine.pooling import CLIENT_PARAMETERS, TASKS, PoolingInfo, PoolingParams, number_texts, pair_texts
from quire_engine.sampling_params import RequestOptions, convert_parameter

from quire_backend.model_config import POOLING_RETURN_FLAGS, POOLING_TYPED_INPUTS, RETURN_FLAGS, TYPED_INPUTS
from quire_backend.request import (
    LONG_PROMPT,
    OTHER_PARAMETERS,
    LongConversation,
    agreeing_values,
    flag,
    json_parameters,
    other_parameter,
    parse_conversation,
    parse_request_parameters,
    scalar,
    take_options,
    text_list,
)
from quire_backend.triton_api import Tensor, TritonRequest, request_parameters

if TYPE_CHECKING:
    from quire_engine.adapters.registry import AdapterRegistry
    from quire_engine.messages import EngineCoreRequest
    from quire_engine.outputs import RequestOutput

OPERATION = "embeddings"
"""As OpenTelemetry names it."""
EMBEDDING_REQUEST = "embedding_request"
JSON_BYTES_PER_NUMBER = 22
PARAMETERS = "pooling_parameters"
MAX_PROMPTS = 16384
"""Prompts of one request."""
MANY_PROMPTS = 16
"""Prompts of a batch whose tokenization takes milliseconds."""
_TYPED_INPUTS = frozenset(spec.name for spec in POOLING_TYPED_INPUTS)
_INPUTS = (_TYPED_INPUTS - {spec.name for spec in TYPED_INPUTS}) | {
    EMBEDDING_REQUEST, PARAMETERS, "text_pair", "input_lengths",
}  # fmt: skip
"""A request with one of them is for vectors."""
_KNOWN_INPUTS = frozenset({
    *_INPUTS, *_TYPED_INPUTS, "text_input", "input_ids", "stream", "exclude_input_in_output",
    *POOLING_RETURN_FLAGS,
})  # fmt: skip
_KNOWN_PARAMETERS = (*CLIENT_PARAMETERS, "priority", *OTHER_PARAMETERS)
_EMBED, _SCORE = "embed", "score"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingRequest:
    """One request, parsed. Whether the model can serve each prompt is checked by the engine."""

    prompts: Sequence[Any]
    """As the engine takes them."""
    priority: int
    options: RequestOptions
    outputs: frozenset[str]
    """Additional outputs."""
    as_text: bool = False
    """Whether the embeddings are in `text_output`, too, as JSON."""
    compared: Sequence[tuple[int, int]] = ()
    """For scores of a model that embeds: the numbers of the two prompts of each."""

    @property
    def is_conversation(self) -> bool:
        return isinstance(self.prompts[0], Conversation | LongConversation)

    @property
    def is_long(self) -> bool:
        """Whether it takes milliseconds to be tokenized."""
        if len(self.prompts) > MANY_PROMPTS or isinstance(self.prompts[0], LongConversation):
            return True
        return self.num_characters > LONG_PROMPT

    @property
    def input_name(self) -> str:
        """The input that has the prompts, unless `embedding_request` has them."""
        first = self.prompts[0]
        return "text_input" if isinstance(first, str | dict) else "input_ids" if isinstance(first, list) else "messages"

    @property
    def num_characters(self) -> int:
        """The length of all texts, about."""
        return sum(len(text) for prompt in self.prompts for text in _texts_of(prompt))


def _texts_of(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, dict):
        yield from prompt.values()


def is_for_vectors(request: TritonRequest, names: Collection[str], info: PoolingInfo) -> bool:
    """Whether a request asks for vectors, even if it is malformed.

    Args:
        request: as the server passes it on.
        names: of its inputs.
        info: what the model offers.
    """
    if not info.can_generate or not _INPUTS.isdisjoint(names):
        return True
    parameters = request_parameters(request)
    return '"task"' in parameters and "task" in json.loads(parameters)


def parse_pooling(request: TritonRequest, info: PoolingInfo, adapters: "AdapterRegistry") -> PoolingRequest:
    """Parse a request. Keeps no reference to the request's memory.

    Args:
        request: as the server passes it on.
        info: what the model offers.
        adapters: that it may name.

    Raises:
        RequestError: something is missing, contradictory, unknown, or of a wrong type or range; or the model does not
            offer the task.
    """
    tensors = {tensor.name(): tensor for tensor in request.inputs()}
    as_text = EMBEDDING_REQUEST in tensors
    prompts, said = _embedding_request(tensors) if as_text else ([], {})
    values = agreeing_values(
        (
            (EMBEDDING_REQUEST, said),
            (PARAMETERS, json_parameters(tensors, PARAMETERS)),
            ("the request parameters", parse_request_parameters(request_parameters(request))),
            ("the input tensors", _typed_parameters(tensors)),
        ),
        _convert,
    )
    task = values.pop("task", _EMBED if as_text else None)
    _reject_generation(tensors, values, task, info)
    prompts = prompts or _prompts(tensors)
    priority = values.pop("priority", 0)
    options = take_options(request, values, OPERATION, adapters)
    params = PoolingParams.from_mapping({**values, "task": task})
    compared: Sequence[tuple[int, int]] = ()
    if "text_pair" in tensors:
        pairs = _pairs(prompts, text_list("text_pair", tensors["text_pair"].as_numpy()))
        task = params.task or (_SCORE if _SCORE in info.tasks or _EMBED in info.tasks else None)
        if task == _SCORE and _SCORE not in info.tasks and _EMBED in info.tasks:
            prompts, compared = number_texts(pairs)
            params = msgspec.structs.replace(params, task=_EMBED)
        else:
            prompts = [{"prompt": text, "pair": pair} for text, pair in pairs]
            params = msgspec.structs.replace(params, task=task)
    elif params.task == _SCORE:
        raise RequestError("text_pair", "text_pair is missing; task score compares each text_input with one")
    params = msgspec.structs.replace(params, task=info.resolve(params).task)
    return PoolingRequest(
        prompts=prompts,
        priority=priority,
        options=msgspec.structs.replace(options, pooling_params=params),
        outputs=frozenset(output for name, output in POOLING_RETURN_FLAGS.items() if flag(tensors, name)),
        as_text=as_text,
        compared=compared,
    )


# -- prompts --------------------------------------------------------------------------------------------------------


def _prompts(tensors: Mapping[str, Tensor]) -> list[Any]:
    given = [name for name in ("text_input", "input_ids", "messages") if name in tensors]
    if len(given) != 1:
        problem = f"{' and '.join(given)} are given" if given else "there is no prompt"
        raise RequestError("text_input", f"{problem}; exactly one of text_input, input_ids and messages must be given")
    if "input_lengths" in tensors and given != ["input_ids"]:
        raise RequestError("input_lengths", f"input_lengths is given with {given[0]}; it is of input_ids alone")
    if given == ["messages"]:
        return [parse_conversation(tensors["messages"])]
    if given == ["text_input"]:
        prompts: list[Any] = text_list("text_input", tensors["text_input"].as_numpy())
    else:
        prompts = _split(tensors)
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise RequestError(given[0], f"{given[0]} holds {len(prompts)} prompts; it must hold from 1 to {MAX_PROMPTS}")
    return prompts


def _split(tensors: Mapping[str, Tensor]) -> list[list[int]]:
    """The prompts of `input_ids`, one after another."""
    token_ids: list[int] = tensors["input_ids"].as_numpy().reshape(-1).tolist()
    if "input_lengths" not in tensors:
        return [token_ids]
    lengths = tensors["input_lengths"].as_numpy().reshape(-1).tolist()
    if len(lengths) > MAX_PROMPTS:
        raise RequestError(
            "input_lengths", f"input_lengths holds {len(lengths)} prompts; at most {MAX_PROMPTS} are taken"
        )
    if any(length < 1 for length in lengths) or sum(lengths) != len(token_ids):
        raise RequestError(
            "input_lengths",
            f"input_lengths adds up to {sum(lengths)}; each must be above 0, and all together the {len(token_ids)} ids "
            "of input_ids",
        )
    ends = np.cumsum(lengths).tolist()
    return [token_ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _pairs(prompts: Sequence[Any], others: Sequence[str]) -> list[tuple[str, str]]:
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("text_pair", "text_pair is given without text_input; pairs are texts")
    return pair_texts(prompts, others, ("text_input", "text_pair"), MAX_PROMPTS)


def _embedding_request(tensors: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Prompts and parameters in vllm_backend's form; `text_input`, which its clients must send, is not read."""
    name = EMBEDDING_REQUEST
    for other in ("input_ids", "input_lengths", "messages", "text_pair"):
        if other in tensors:
            raise RequestError(other, f"{other} is given with {name}, whose input is the prompt")
    said = json_parameters(tensors, name)
    for key in said:
        if key not in ("input", "pooling_params"):
            raise RequestError(name, f"{name} holds {quote(key)}; it must hold input, and may hold pooling_params")
    prompts, params = said.get("input"), said.get("pooling_params") or {}
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and all(type(one) is int for one in prompts)):
        prompts = [prompts]
    are_ids = isinstance(prompts, list) and all(
        isinstance(one, list) and all(type(id_) is int and -(2**31) <= id_ < 2**31 for id_ in one) for one in prompts
    )
    are_texts = isinstance(prompts, list) and all(isinstance(one, str) for one in prompts)
    if not prompts or not (are_ids or are_texts) or len(prompts) > MAX_PROMPTS:
        raise RequestError.because(
            name, f"input must be a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"
        )
    if not isinstance(params, dict):
        raise RequestError.because(name, f"pooling_params must be an object, not {json_type(params)}")
    dimensions = params.get("dimensions")
    if isinstance(dimensions, list) and len(dimensions) == 1:  # as vllm_backend takes them
        params = {**params, "dimensions": dimensions[0]}
    return prompts, params


# -- parameters -----------------------------------------------------------------------------------------------------


def _convert(name: str, value: Any) -> Any:
    if name in OTHER_PARAMETERS:
        return other_parameter(name, value)
    return convert_parameter(name, value) if name == "priority" else value


def _typed_parameters(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    values = {}
    for spec in POOLING_TYPED_INPUTS:
        if spec.name in tensors:
            array = tensors[spec.name].as_numpy()
            is_text = spec.data_type == "TYPE_STRING"
            values[spec.name] = text_list(spec.name, array)[0] if is_text else scalar(spec.name, array).item()
    return values


def _reject_generation(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any], task: object, info: PoolingInfo
) -> None:
    """Reject what has a meaning in a request for text alone. If the model makes none, a request that names no task
    was meant for another model, and the error says what this one can do.
    """
    known = _KNOWN_INPUTS if task is None and PARAMETERS not in tensors else _KNOWN_INPUTS | {"messages"}
    names = [name for name in tensors if name not in known and (name not in RETURN_FLAGS or flag(tensors, name))]
    names += [name for name in values if name not in _KNOWN_PARAMETERS]
    if task == "generate" and info.can_generate:
        raise RequestError("task", "task is generate, which is what this model does without a task; leave it out")
    if task == "generate" or (names and task is None and not info.can_generate):
        raise RequestError("task", f"task is generate; this model offers {', '.join(info.tasks)}")
    if task is not None and task not in TASKS:
        raise RequestError("task", f"task is {quote(task)}; it must be one of {', '.join(TASKS)}")
    if names:
        listed = ", ".join(sorted(_KNOWN_PARAMETERS))
        raise RequestError(
            names[0], f"{names[0][:MAX_QUOTED]} has no meaning in a request for vectors; its parameters are {listed}"
        )


@dataclass(kw_only=True, slots=True)
class PoolingBatch:
    """The prompts of one request on their way through the engine. Only the event loop's thread uses it."""

    request: PoolingRequest
    waiting: deque[tuple[int, "EngineCoreRequest"]] = field(default_factory=deque)
    """Prompts that the engine has not yet, with their numbers."""
    live: set[str] = field(default_factory=set)
    """Ids of those that it has."""
    done: dict[int, "RequestOutput"] = field(default_factory=dict)
    """The output of each prompt that has ended, by its number."""
    has_failed: bool = False
    """Whether one has failed, and so the whole request."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts that wait."""
        return sum(len(processed.prompt_token_ids) for _, processed in self.waiting)

    @property
    def num_bytes(self) -> int:
        """The size of the numbers in the response."""
        if self.request.compared:
            return 4 * len(self.request.compared)
        return bytes_in_response(self.request, self.num_vector_bytes)

    @property
    def num_vector_bytes(self) -> int:
        """The size of all vectors."""
        return sum(len(output.pooled.data) for output in self.done.values() if output.pooled is not None)


def bytes_in_response(request: PoolingRequest, num_bytes: int) -> int:
    """How large so many bytes of float32 are in the response, with their JSON."""
    return num_bytes + num_bytes // 4 * JSON_BYTES_PER_NUMBER * request.as_text
