"""Tensors and request parameters → prompt, sampling parameters, options of the answer.

A sampling parameter can be given in three places: in the JSON of `sampling_parameters`, as a request parameter, and as
an input tensor. vllm_backend's own client gives each twice. Values given twice must agree, once both are converted to
the parameter's type; nothing is ignored silently.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from quire_engine.encoders.embeds import ImageEmbeds
from quire_engine.encoders.video import Video
from quire_engine.errors import MAX_QUOTED, RequestError, UnknownAdapterError, cut, did_you_mean, json_type, quote
from quire_engine.frontend.chat_template import TWO_ENDINGS, Conversation
from quire_engine.frontend.default_sampling_params import NO_DEFAULTS, DefaultSamplingParams
from quire_engine.frontend.image_parts import decode_media
from quire_engine.lora import Adapter, LoRARequest
from quire_engine.sampling_params import (
    DEFAULT_OPERATION,
    NO_OPTIONS,
    PARAMETER_TYPES,
    TEXT,
    RequestOptions,
    SamplingParams,
    convert_parameter,
    is_text,
)
from quire_engine.slo import RequestSLO

from quire_backend.model_config import RETURN_FLAGS, SAMPLING_INPUTS
from quire_backend.triton_api import MOST_LABEL_CHARACTERS, Tensor, TritonRequest, request_id, request_parameters

if TYPE_CHECKING:
    from quire_engine.adapters.registry import AdapterRegistry

SLO_PARAMETERS = ("slo_class", "slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms")
INPUT_NAMES = {
    "prompt": "text_input", "prompt_token_ids": "input_ids", "pair": "text_pair", "multi_modal_data": "image",
}  # fmt: skip
"""Names of the inputs that the engine knows under other names."""
_PROMPTS = ("text_input", "input_ids", "messages", "prompt_embeds")
_TRACEPARENT = "traceparent"
_RESPONSE_ID = "response_id"
_LORA_NAME = "lora_name"
OTHER_PARAMETERS = (*SLO_PARAMETERS, _TRACEPARENT, _RESPONSE_ID, _LORA_NAME)
"""Given in the same places as sampling parameters."""

STREAM_WITH_PROMPT = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
NO_LORA = "LoRA feature is not enabled."
"""vllm_backend's message, which its clients compare, as they do that of an unknown adapter."""
_MOST_SHOWN_ADAPTERS = 32

INPUTS_ALONE = ("image", "embedding_request")
"""Inputs of vllm_backend's that are no parameters. tritonserver passes keys of these names in `parameters` of an HTTP
body on as parameters, and so those in the body itself where the model does not declare the input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOptions:
    """What the responses contain."""

    stream: bool = False
    """Many responses with a delta in each, or one with everything."""
    prepend_prompt: bool = False
    """Begin `text_output` with the prompt; never when streaming."""
    outputs: frozenset[str] = frozenset()
    """Additional outputs, which every response then carries."""
    logprobs: bool = False
    """Whether log-probabilities were requested, and not only computed for `cumulative_logprob`."""
    num_sequences: int = 1
    """Outputs of every response: one per sequence of `n`."""
    report_cached_tokens: bool = True
    """The setting of that name."""

    @property
    def shows_logprobs(self) -> bool:
        """Whether responses hold log-probabilities of what was generated."""
        return self.logprobs and "logprobs" in self.outputs


@dataclass(frozen=True, slots=True)
class Embeds:
    """Hidden states in the place of a prompt's tokens."""

    rows: npt.NDArray[np.float32]
    """[tokens, hidden_size]"""


@dataclass(frozen=True, slots=True)
class LongConversation:
    """The JSON of a conversation that is too long to be read while other requests wait."""

    text: str

    def parse(self, max_model_len: int) -> Conversation:
        """Read it, in pieces: no other thread runs during a call of the JSON decoder.

        Args:
            max_model_len: what has more items than that in one place cannot fit.

        Raises:
            RequestError: it is no conversation, or cannot be one that the model takes.
        """
        return _conversation(self.text, max_model_len)


Prompt = str | list[int] | Embeds | Conversation | LongConversation
"""Text, token ids, hidden states, or a conversation, whose messages are not checked yet."""

LONG_PROMPT = 64 << 10
"""Characters of a prompt that takes milliseconds to be read and tokenized."""
MAX_PARAMETERS_LENGTH = 2 << 20
"""Characters of `sampling_parameters`, and of the request parameters: several times the largest that can be valid."""

_MAX_STRUCTURE = 1 << 20
"""Commas and brackets of a conversation: that many values are read in a tenth of a second, in which nothing is sent."""
_MAX_SPLIT_DEPTH = 4
"""Levels of nesting that are split: messages, their content, and its parts. Each level is scanned once more."""
_CONVERSATION = frozenset(Conversation.__struct_fields__) - {"images"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One request, parsed and converted. Whether the model can serve it is checked by the engine."""

    prompt: Prompt
    sampling_params: SamplingParams
    options: ResponseOptions
    request_options: RequestOptions = NO_OPTIONS
    images: Sequence[bytes] = ()
    """Files in base64."""


def parse_request(
    request: TritonRequest, defaults: DefaultSamplingParams = NO_DEFAULTS, adapters: "AdapterRegistry | None" = None
) -> GenerateRequest:
    """Parse a request. Keeps no reference to the request's memory.

    Args:
        request: as the server passes it on.
        defaults: for the sampling parameters that it leaves out.
        adapters: that it may name; None: none.

    Raises:
        UnknownAdapterError: it names an adapter that there is not.
        RequestError: something is missing, contradictory, unknown, or of a wrong type or range.
    """
    tensors = {tensor.name(): tensor for tensor in request.inputs()}
    prompt = _prompt(tensors)
    options = _options(tensors, has_text=isinstance(prompt, str))
    values = _sampling_parameters(tensors, request_parameters(request))
    is_chat = isinstance(prompt, Conversation | LongConversation)
    request_options = take_options(request, values, operation_of(tensors), adapters)
    params = defaults.complete(values, is_chat=is_chat)
    options = replace(options, logprobs=params.logprobs is not None, num_sequences=params.n)
    if params.logprobs is None and "cumulative_logprob" in options.outputs:
        params = msgspec.structs.replace(params, logprobs=0)
    images = parse_images(tensors, prompt)
    return GenerateRequest(
        prompt=prompt, sampling_params=params, options=options, request_options=request_options, images=images
    )


def take_options(
    request: TritonRequest, values: dict[str, Any], operation: str, adapters: "AdapterRegistry | None"
) -> RequestOptions:
    """The caller's other options.

    Args:
        request: as the server passes it on.
        values: the parameters; `OTHER_PARAMETERS` are taken out of them.
        operation: OpenTelemetry's name for it.
        adapters: that it may name; None: none.

    Raises:
        UnknownAdapterError: it names an adapter that there is not.
        RequestError: the id is not UTF-8.
    """
    slo = {name.removeprefix("slo_") if name != "slo_class" else name: values.pop(name)
           for name in SLO_PARAMETERS if name in values}  # fmt: skip
    return RequestOptions(
        deadline_ms=request.timeout() / 1000 or None,
        slo=RequestSLO(**slo),
        traceparent=values.pop(_TRACEPARENT, None),
        label=request_id(request),
        operation=operation,
        response_id=values.pop(_RESPONSE_ID, "")[:MOST_LABEL_CHARACTERS],
        adapter=_adapter(values.pop(_LORA_NAME, None), adapters),
    )


def _adapter(name: str | None, adapters: "AdapterRegistry | None") -> Adapter | None:
    if name is None:
        return None
    if adapters is None or not adapters.is_enabled:
        raise UnknownAdapterError(_LORA_NAME, NO_LORA)
    try:
        return adapters.find(LoRARequest(name))
    except UnknownAdapterError:
        names = adapters.names
        shown = f"{names[:_MOST_SHOWN_ADAPTERS]}"
        more = f" and {len(names) - _MOST_SHOWN_ADAPTERS} others" if len(names) > _MOST_SHOWN_ADAPTERS else ""
        raise UnknownAdapterError(
            _LORA_NAME,
            f"LoRA {cut(name)} is not supported, we currently support {shown}{more}{did_you_mean(name, names)}",
        ) from None


def operation_of(inputs: Collection[str]) -> str:
    """OpenTelemetry's name for what a request with these inputs asks for, even if one of them is malformed."""
    return "chat" if "messages" in inputs else DEFAULT_OPERATION


def parse_prompt(request: TritonRequest) -> Prompt:
    """The prompt of a request alone.

    Raises:
        RequestError: there is none, or more than one.
    """
    return _prompt({tensor.name(): tensor for tensor in request.inputs()})


def traceparent_parameter(request: TritonRequest) -> str | None:
    """The request parameter `traceparent` alone, even of a request that is malformed otherwise."""
    try:
        value = json.loads(request_parameters(request), object_pairs_hook=_named_once)[_TRACEPARENT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if isinstance(value, str) else None


# -- prompt and options ---------------------------------------------------------------------------------------------


def _prompt(tensors: Mapping[str, Tensor]) -> Prompt:
    given = [name for name in _PROMPTS if name in tensors]
    if len(given) > 1:
        raise RequestError(
            given[1],
            f"{given[0]} and {given[1]} are both given; exactly one of {', '.join(_PROMPTS)} must be",
        )
    if "text_input" in tensors:
        return _text("text_input", scalar("text_input", tensors["text_input"].as_numpy()))
    if "input_ids" in tensors:
        token_ids: list[int] = tensors["input_ids"].as_numpy().reshape(-1).tolist()
        return token_ids
    if "prompt_embeds" in tensors:
        return Embeds(np.array(tensors["prompt_embeds"].as_numpy()))
    if "messages" in tensors:
        return parse_conversation(tensors["messages"])
    raise RequestError("text_input", "text_input is missing; give it, or input_ids, messages or prompt_embeds instead")


def parse_images(tensors: Mapping[str, Tensor], prompt: Prompt) -> list[bytes]:
    """The input `image`, vllm_backend's: files in base64 or as `data:` URLs, of the placeholders in a text or the
    places in messages. A `data:` URL may also be that of a video, and an image may be its hidden states in JSON.

    Raises:
        RequestError: the prompt is one of hidden states.
    """
    if "image" not in tensors or not (values := tensors["image"].as_numpy().reshape(-1)).size:
        return []
    if isinstance(prompt, Embeds):
        raise RequestError("image", "image and prompt_embeds are both given; images go into text, ids or messages")
    return [value.encode() if isinstance(value, str) else bytes(value) for value in values]


def decode_images(images: Sequence[bytes]) -> list[bytes | Video | ImageEmbeds]:
    """Files, videos and hidden states of the input `image`. Raises RequestError if one is none."""
    try:
        return [decode_media(image) for image in images]
    except ValueError as error:
        raise RequestError.because("image", str(error).removeprefix("multi_modal_data: ")) from None


def parse_conversation(tensor: Tensor) -> Conversation | LongConversation:
    """The input `messages`.

    Raises:
        RequestError: it is not JSON of a conversation.
    """
    text = _text("messages", scalar("messages", tensor.as_numpy()))
    return LongConversation(text) if len(text) > LONG_PROMPT else _conversation(text)


def _conversation(text: str, max_items: int | None = None) -> Conversation:
    try:
        messages = msgspec.json.decode(text) if max_items is None else _decode_long(text, max_items)
    except RecursionError:
        raise RequestError("messages", "messages is not JSON that can be read: it nests too deeply") from None
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError("messages", f"messages is not JSON: {error}") from None
    values = {"messages": messages} if isinstance(messages, list) else messages
    if not isinstance(values, dict) or "messages" not in values or not _CONVERSATION.issuperset(values):
        raise RequestError(
            "messages",
            f"messages must be a JSON list of messages, or an object of them with {', '.join(sorted(_CONVERSATION))}, "
            f"not {json_type(messages)}",
        )
    if values.get("add_generation_prompt") and values.get("continue_final_message"):
        raise RequestError.because("messages", TWO_ENDINGS)
    try:
        return msgspec.convert(values, Conversation)
    except msgspec.ValidationError as error:
        raise RequestError.because("messages", str(error)) from None


def _decode_long(text: str, max_items: int) -> Any:
    """The value of a long JSON text, read item by item.

    Raises:
        RequestError: it cannot fit the model.
    """
    size = sum(text.count(mark) for mark in ",[{")
    if size > _MAX_STRUCTURE:
        raise RequestError("messages", f"messages holds {size} commas and brackets; at most {_MAX_STRUCTURE} are taken")
    return _decode(text, max_items)


def _decode(text: "str | msgspec.Raw", max_items: int, depth: int = 0) -> Any:
    if len(text) <= LONG_PROMPT or depth == _MAX_SPLIT_DEPTH:
        return msgspec.json.decode(text)
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw] | dict[str, msgspec.Raw])
    except msgspec.ValidationError:  # a string
        return msgspec.json.decode(text)
    if len(items) > max_items:
        raise RequestError(
            "messages",
            f"messages holds {len(items)} items in one place; they cannot fit max_model_len={max_items} tokens",
        )
    if isinstance(items, list):
        return [_decode(item, max_items, depth + 1) for item in items]
    return {name: _decode(item, max_items, depth + 1) for name, item in items.items()}


def _options(tensors: Mapping[str, Tensor], *, has_text: bool) -> ResponseOptions:
    stream = flag(tensors, "stream") or False
    exclude_input = flag(tensors, "exclude_input_in_output")
    if exclude_input is False and stream:
        raise RequestError("exclude_input_in_output", STREAM_WITH_PROMPT)
    if exclude_input is False and not has_text:
        raise RequestError(
            "exclude_input_in_output", "exclude_input_in_output is false; there is only text to include with text_input"
        )
    return ResponseOptions(
        stream=stream,
        prepend_prompt=has_text and not stream and not exclude_input,
        outputs=frozenset(output for name, output in RETURN_FLAGS.items() if flag(tensors, name)),
    )


def flag(tensors: Mapping[str, Tensor], name: str) -> bool | None:
    """The value of an input that is true or false; None if it is not given."""
    return bool(scalar(name, tensors[name].as_numpy())) if name in tensors else None


# -- sampling parameters --------------------------------------------------------------------------------------------


def _sampling_parameters(tensors: Mapping[str, Tensor], parameters: str) -> dict[str, Any]:
    """All sampling parameters of a request from the three places, each converted to its type."""
    return agreeing_values(
        (
            ("sampling_parameters", json_parameters(tensors, "sampling_parameters")),
            ("the request parameters", parse_request_parameters(parameters)),
            ("the input tensors", _typed_parameters(tensors)),
        ),
        _sampling_parameter,
    )


def _sampling_parameter(name: str, value: Any) -> Any:
    """One parameter as its own type; None: unset."""
    if name in INPUTS_ALONE:
        raise RequestError(name, f"{name} is not supported as a parameter: this model takes it as an input tensor")
    if name == "output_kind":
        raise RequestError(name, "output_kind cannot be chosen here; the input stream says what a response holds")
    return other_parameter(name, value) if name in OTHER_PARAMETERS else convert_parameter(name, value)


def agreeing_values(
    places: Iterable[tuple[str, Mapping[str, Any]]], convert: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """All parameters of a request, from all places in which they may be.

    Args:
        places: names for messages, and what is said there.
        convert: makes a value of what was said; None counts as unset.

    Raises:
        RequestError: one is said twice, and differently.
    """
    values: dict[str, Any] = {}
    found: dict[str, str] = {}
    for place, said in places:
        for name, value in said.items():
            converted = convert(name, value)
            if converted is None:
                continue
            if name in values and not _agree(values[name], converted):
                first = f"{name} is {quote(values[name])} in {found[name]}"
                raise RequestError(name, f"{first} but {quote(converted)} in {place}; they must agree")
            # The first place wins: where they agree, JSON has a float's full precision.
            values.setdefault(name, converted)
            found.setdefault(name, place)
    return values


def other_parameter(name: str, value: Any) -> str | float | None:
    """A name unchanged; a time as a number, which a request parameter may also give as text."""
    if value is None:
        return None
    if name in ("slo_class", _TRACEPARENT, _RESPONSE_ID, _LORA_NAME):
        if isinstance(value, str) and is_text(value):
            return value
        allowed = TEXT if isinstance(value, str) else "a string"
        raise RequestError(name, f"{name} is {quote(value)}; it must be {allowed}")
    try:
        return float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(name, f"{name} is {quote(value)}; it must be a number of milliseconds") from None


def _agree(first: Any, second: Any) -> bool:
    """Equal, or equal as FP32: a typed input cannot hold 0.1 more precisely."""
    if isinstance(first, float) and isinstance(second, float):
        return bool(np.float32(first) == np.float32(second))
    return bool(first == second)


def json_parameters(tensors: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """The JSON object in an input, if it is given.

    Raises:
        RequestError: it is no such object.
    """
    if name not in tensors:
        return {}
    text = _text(name, scalar(name, tensors[name].as_numpy()))
    _check_length(name, text)
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: _agreeing(name, pairs)) if text else {}
    except json.JSONDecodeError as error:
        raise RequestError(name, f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(name, f"{name} is not JSON that can be read: it nests too deeply") from None
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(name, f"{name} is not JSON that can be read: a number has too many digits") from None
    if not isinstance(values, dict):
        raise RequestError(name, f"{name} must be a JSON object, not {json_type(values)}")
    return values


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_PARAMETERS_LENGTH:
        raise RequestError(name, f"{name} has {len(text)} characters; at most {MAX_PARAMETERS_LENGTH} are taken")


def _agreeing(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which no name may occur with two values."""
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if value != values[name]:
                raise RequestError(
                    name,
                    f"{name[:MAX_QUOTED]} is said twice in {place}, as {quote(value)} and as {quote(values[name])}; "
                    "they must agree",
                )
    return values


def parse_request_parameters(parameters: str) -> dict[str, Any]:
    """Request parameters without Triton's own: `triton_enable_empty_final_response`, and the `id` of an HTTP body,
    which names the request and is passed on as a parameter as well.

    Raises:
        RequestError: they are too long, or contradict each other.
    """
    if not parameters:
        return {}
    _check_length("parameters", parameters)
    values = json.loads(parameters, object_pairs_hook=_named_once)
    return {name: value for name, value in values.items() if name != "id" and not name.startswith("triton_")}


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The request parameters. A forwarded header may be among them: HTTP knows no case, and what the client says of the
    trace as a parameter, which comes first, is more than what its gRPC library adds."""
    traces = [value for name, value in pairs if name.lower() == _TRACEPARENT]
    others = [pair for pair in pairs if pair[0].lower() != _TRACEPARENT]
    return {**_agreeing("the request parameters", others), **({_TRACEPARENT: traces[0]} if traces else {})}


def _typed_parameters(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for input_name, name in SAMPLING_INPUTS.items():
        if input_name not in tensors:
            continue
        array = tensors[input_name].as_numpy()
        if PARAMETER_TYPES[name] == list[str]:
            values[name] = text_list(input_name, array)
        elif PARAMETER_TYPES[name] == list[int]:
            values[name] = array.reshape(-1).tolist()
        elif array.dtype == np.object_:
            values[name] = _text(input_name, scalar(input_name, array))
        elif array.dtype == np.float32:
            # The shortest decimal that is this FP32 number: 0.1, not 0.10000000149.
            values[name] = float(str(scalar(input_name, array)))
        else:
            values[name] = scalar(input_name, array).item()
    return values


# -- values ---------------------------------------------------------------------------------------------------------


def scalar(name: str, array: npt.NDArray[Any]) -> Any:
    """The one value of an input.

    Raises:
        RequestError: it holds another number of values.
    """
    if array.size != 1:
        raise RequestError(name, f"{name} holds {array.size} values; it must hold one")
    return array.reshape(-1)[0]


def text_list(name: str, array: npt.NDArray[Any]) -> list[str]:
    """The texts of an input.

    Raises:
        RequestError: one is not UTF-8.
    """
    return [_text(name, item) for item in array.reshape(-1)]


def _text(name: str, value: bytes | str) -> str:
    try:
        return value if isinstance(value, str) else bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(name, f"{name} is not valid UTF-8 at byte {error.start}") from None
