"""How a model writes calls and reasoning, as the model itself says, and what follows for a request."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from quire_gateway.chat import ChatRequest
from quire_gateway.errors import ApiError, InvalidRequestError
from quire_gateway.output_parser import (
    REASONING_FORMS,
    TOOL_CALL_FORMS,
    Form,
    OutputParser,
    harmony,
    named_call,
    plain,
    required_calls,
)

_Chat = TypeVar("_Chat", bound=ChatRequest)
MAX_AGE_S = 5.0
"""How long an answer holds: a model that was loaded again with other settings is known that soon."""
_HARMONY = ("openai", "openai_gptoss")
"""vLLM's names of its two halves, of which neither is without the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """The model's settings of these names."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Its default sampling parameters, of those that a response repeats."""
    failure: ApiError | None = None
    """Why the model has not said it."""

    @property
    def is_harmony(self) -> bool:
        """Whether it is gpt-oss's."""
        return (self.tool_call_parser, self.reasoning_parser) == _HARMONY

    def read(self, request: _Chat) -> tuple[_Chat, Callable[[], OutputParser] | None]:
        """The request as the model has to get it, and what makes the parser of each answer; None: all is content.

        Raises:
            InvalidRequestError: the model may call functions, but in no known form.
            ApiError: the model has not answered, and its form matters.
        """
        form = self._form(request)
        if form is None:
            return request, None
        # Marks of calls are special tokens in many checkpoints, and would not be in the text.
        has_marks = self.is_harmony or (request.tool_choice is not None and request.tool_choice.kind == "auto")
        if has_marks and "skip_special_tokens" not in request.sampling:
            request = replace(request, sampling=request.sampling | {"skip_special_tokens": False})
        return request, lambda: OutputParser(form)

    def _form(self, request: ChatRequest) -> Form | None:
        choice = request.tool_choice
        if choice and choice.kind == "named":
            return named_call(choice.name)
        if choice and choice.kind == "required":
            return required_calls
        if choice and self.failure is not None:
            raise self.failure
        if choice and self.tool_call_parser is None:
            raise InvalidRequestError(
                "tools",
                "tools: this model does not say in which form it calls functions, so it cannot choose to: set its "
                "tool_call_parser, or ask for a call with tool_choice, required or a named function",
            )
        structure = request.sampling.get("structured_outputs")
        if structure is not None and not (isinstance(structure, dict) and "structural_tag" in structure):
            return None  # the text has the form that was asked for, and no other
        if self.is_harmony:
            return harmony(choice is not None)
        body = TOOL_CALL_FORMS[self.tool_call_parser or ""](choice.names) if choice else plain
        if self.reasoning_parser is not None:
            return REASONING_FORMS[self.reasoning_parser](body)
        return body if choice else None


class ChatFormats:
    """What each model has said, for a while.

    Args:
        ask: asks a model a question.
        clock: in seconds.
    """

    def __init__(self, ask: Callable[[str, str], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._asked: dict[str, tuple[float, asyncio.Task[ChatFormat]]] = {}

    async def of(self, model: str) -> ChatFormat:
        """The format of a model; of one that does not answer, nothing is known."""
        now = self._clock()
        asked_at, task = self._asked.get(model, (now - MAX_AGE_S, None))
        if task is None or now - asked_at >= MAX_AGE_S:
            for name in [name for name, (at, _) in self._asked.items() if now - at >= MAX_AGE_S]:
                del self._asked[name]  # names are what clients say: they are not kept
            task = asyncio.create_task(self._ask_for(model))
            self._asked[model] = now, task
        return await asyncio.shield(task)  # others wait for it too

    async def _ask_for(self, model: str) -> ChatFormat:
        try:
            said = await self._ask(model, "chat_format")
        except ApiError as error:
            self._asked.pop(model, None)  # the next request asks again
            return ChatFormat(failure=error)
        calls, reasoning = said.get("tool_call_parser"), said.get("reasoning_parser")
        if (calls, reasoning) != _HARMONY:
            calls = calls if calls in TOOL_CALL_FORMS else None
            reasoning = reasoning if reasoning in REASONING_FORMS else None
        sampling = {name: said[name] for name in ("temperature", "top_p") if name in said}
        return ChatFormat(tool_call_parser=calls, reasoning_parser=reasoning, sampling=sampling)
