"""Bodies of OpenAI's requests → prompts and sampling parameters of the model.

Only what the gateway itself needs is looked at here. Everything else goes to the model under the name that the client
gave it, and the model says what is wrong with it, unknown names included: vLLM's extra parameters are its own. A field
that is wrong is an InvalidRequestError.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from quire_engine.errors import RequestError
from quire_engine.sampling_params import convert_parameter, is_text

from quire_gateway.errors import InvalidRequestError, of_model
from quire_gateway.fields import Fields
from quire_gateway.prompt_embeds import read_prompt_embeds
from quire_gateway.triton_messages import Prompt

MAX_PROMPTS = 2048
"""Prompts of one request to /v1/completions or /v1/embeddings, as with OpenAI."""
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""OpenAI's, of which the last changes nothing here, and vLLM's."""
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "prediction", "verbosity", "guided_decoding_backend",
)  # fmt: skip
"""Fields that change nothing in the answer: OpenAI's own bookkeeping, hints to its own models, and which library of
vLLM's enforces a format."""


_COUNTED = ("n", "max_tokens", "logprobs")
"""Parameters that limits count; clients give them as 100, 100.0 or "100"."""
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older names → kinds of `structured_outputs`."""
_TYPES = ("text", "json_object", "json_schema", "structural_tag")
"""Of a `response_format`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What one HTTP request asks of a model.

    Raises:
        InvalidRequestError: a parameter that limits count is not a number.
    """

    model: str
    prompts: list[Prompt]
    sampling: dict[str, Any]
    """Sampling parameters, under the model's names."""
    said: frozenset[str]
    """All fields of the body."""
    renamed: dict[str, str] = field(default_factory=dict)
    """The model's name of a parameter → the client's, where they differ."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    continuous_usage: bool = False
    """Whether each chunk has the usage so far."""
    outputs: frozenset[str] = frozenset()
    """The model's outputs that are needed besides those of every answer."""
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
    """Whether log-probabilities name tokens `token_id:N`."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    is_without_output: bool = False
    """Whether the answer ends with the prompt; the model is asked for one token, the least that it makes."""

    def __post_init__(self) -> None:
        """Convert what limits count as the model would, so that the model gets the number that was checked."""
        for name in _COUNTED:
            if name in self.sampling:
                try:
                    self.sampling[name] = convert_parameter(name, self.sampling[name])
                except RequestError as error:
                    said = of_model(400, str(error), self.said, self.renamed)
                    raise InvalidRequestError(said.param, str(said)) from None


def parse_completion(fields: Fields) -> GenerationRequest:
    """The body of /v1/completions."""
    prompt, given, echo = fields.take("prompt"), fields.take("prompt_embeds"), fields.flag("echo")
    embeds: list[Prompt] = [] if given is None else [*read_prompt_embeds(given, MAX_PROMPTS)]
    if embeds and echo:
        raise InvalidRequestError("echo", "echo must be false with prompt_embeds, which have no text")
    prompts = embeds if embeds and prompt in (None, "") else embeds + read_prompts(prompt)
    neutral = (True,) if isinstance(prompts[0], str) else (True, False)
    fields.check_absent({"add_special_tokens": neutral}, {"add_special_tokens": "give token ids for other tokens"})
    common = take_common(fields, {})
    common |= {"prompts": prompts, "echo": echo}
    common["renamed"] |= {"text_input": "prompt", "input_ids": "prompt"}
    if echo:
        _ask_for_prompts(common)
    request = GenerationRequest(**common)
    if request.sampling.get("max_tokens") != 0:
        return request
    request.sampling["max_tokens"] = 1
    return replace(request, is_without_output=True)


def _ask_for_prompts(common: dict[str, Any]) -> None:
    """Have the model say of the prompts what an answer that begins with them needs."""
    sampling = common["sampling"]
    if "logprobs" in sampling and "prompt_logprobs" not in sampling:
        sampling["prompt_logprobs"] = sampling["logprobs"]
        common["renamed"]["prompt_logprobs"] = "logprobs"
    if "logprobs" in sampling or not all(isinstance(prompt, str) for prompt in common["prompts"]):
        common["outputs"] |= {"prompt_token_ids"}


def take_common(fields: Fields, renamed: dict[str, str]) -> dict[str, Any]:
    """What all kinds of requests have, as arguments of `GenerationRequest`; takes everything that is left.

    Args:
        fields: of the body.
        renamed: names of the model that the client's differ from.
    """
    model = take_model(fields)
    stream = fields.flag("stream")
    options = _stream_options(fields.take_as(dict, "stream_options", "an object"), stream)
    for name in _IGNORED:
        fields.take(name)
    returns_token_ids = fields.flag("return_token_ids")
    names_tokens_by_id = fields.flag("return_tokens_as_token_ids")
    structure, origin = take_structured_outputs(fields)
    sampling = fields.rest()
    seed = sampling.get("seed")
    if type(seed) is int and -(2**63) <= seed < -1:  # OpenAI's have a sign; the model's have none
        sampling["seed"] = seed % 2**64
    if structure is not None:
        sampling = sampling | {"structured_outputs": structure}
        renamed = renamed | {"structured_outputs": origin}
    return {"model": model, "stream": stream, "include_usage": "include_usage" in options,
            "continuous_usage": {"include_usage", "continuous_usage_stats"} <= options,
            "returns_token_ids": returns_token_ids, "names_tokens_by_id": names_tokens_by_id,
            "outputs": frozenset({"token_ids", "prompt_token_ids"} if returns_token_ids else ()),
            "sampling": sampling, "renamed": renamed, "said": fields.said}  # fmt: skip


def take_model(fields: Fields) -> str:
    """The name of the model."""
    model = fields.take("model")
    if not isinstance(model, str) or not model or not is_text(model):
        raise InvalidRequestError("model", "model must be the name of a model, as /v1/models lists them")
    return model


def _stream_options(options: dict[str, Any] | None, stream: bool) -> set[str]:
    """Those that are true."""
    if options is None:
        return set()
    if not stream:
        raise InvalidRequestError("stream_options", "stream_options is given without stream, which must then be true")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS:
            known = ", ".join(_STREAM_OPTIONS)
            raise InvalidRequestError("stream_options", f"stream_options has {name[:100]!r}; known are {known}")
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError("stream_options", f"stream_options.{name} must be true or false")
    return {name for name, value in options.items() if value}


# -- the format that an answer must have ------------------------------------------------------------------------------


def take_structured_outputs(fields: Fields) -> tuple[Any, str]:
    """The model's `structured_outputs`, from any of its names, and that name. None: there is none.

    Raises:
        InvalidRequestError: there are several, or `response_format` is of no known type.
    """
    found: dict[str, Any] = {}
    structured = fields.take("structured_outputs")
    if structured is not None:
        found["structured_outputs"] = structured
    if (response_format := fields.take("response_format")) is not None:
        structure = _response_format(response_format)
        if structure is not None:
            found["response_format"] = structure
    for name, kind in _GUIDED.items():
        value = fields.take(name)
        if value is not None and structured is None:  # as in vLLM, the newer name decides
            found[name] = {kind: value}
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequestError(next(iter(found)), f"{names} are given together; give one of them")
    return next(((value, name) for name, value in found.items()), (None, ""))


def _response_format(value: Any) -> dict[str, Any] | None:
    match value:
        case {"type": "text"}:
            return None
        case {"type": "structural_tag"}:
            return {"structural_tag": value}
        case {"type": "json_object", "schema": dict(schema)}:  # as other servers have it
            return {"json": schema}
        case {"type": "json_object"}:
            if value.get("schema") is not None:
                raise InvalidRequestError("response_format", "response_format.schema must be a JSON schema")
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise InvalidRequestError("response_format", "response_format.json_schema.schema must be a JSON schema")
    raise InvalidRequestError(
        "response_format", f"response_format must be an object whose type is one of {', '.join(_TYPES)}"
    )


# -- prompts ----------------------------------------------------------------------------------------------------------


def read_prompts(prompt: Any, name: str = "prompt") -> list[Any]:
    """Text, a list of texts, token ids, or a list of lists of token ids.

    Args:
        prompt: the field's value.
        name: the field's name.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(is_token_id(item) for item in prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequestError(name, f"{name} holds {len(prompt)} prompts; at most {MAX_PROMPTS} are taken")
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) and item and all(map(is_token_id, item)) for item in prompt):
            return prompt
    raise InvalidRequestError(
        name, f"{name} must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


def is_token_id(value: object) -> bool:
    """Whether it is what an INT32 can hold; whether the model has it, the model says."""
    return type(value) is int and -(2**31) <= value < 2**31
