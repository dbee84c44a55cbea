"""Reasoning, and the forms of calls, by the names that vLLM gives their parsers."""

import re
from collections.abc import Callable, Collection, Mapping

from quire_gateway.output_parser.json_text import read_call, read_calls, read_value
from quire_gateway.output_parser.message import Message
from quire_gateway.output_parser.text import Form, Steps, Text

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
_THINK, _END_THINK = "<think>", "</think>"
_MISTRAL_NAME = re.compile(r"([\w.-]+)(\[CALL_ID\]\w+)?(\[ARGS\])?")


def plain(text: Text, message: Message) -> Steps[None]:
    """All of it is content."""
    yield from text.until(take=message.content)


# -- calls ------------------------------------------------------------------------------------------------------------


def hermes(text: Text, message: Message) -> Steps[None]:
    """Hermes, Qwen: text, and `<tool_call>{"name": …, "arguments": …}</tool_call>`, once or several times."""
    marker = yield from text.until(_OPEN, take=message.content)
    while marker:
        blank = yield from text.blank()
        if (yield from read_call(text, message)):
            marker = yield from text.until(_CLOSE, _OPEN, take=lambda part: None)
        else:
            message.content(_OPEN + blank)
            marker = None
        if marker != _OPEN:
            marker = yield from text.until(_OPEN, take=message.content)


def mistral(text: Text, message: Message) -> Steps[None]:
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}, …]`, or, of newer tokenizers, `[TOOL_CALLS]name[ARGS]{…}`."""
    while (yield from text.until(_TOOL_CALLS, take=message.content)):
        blank = yield from text.blank()
        read = read_calls if (yield from text.starts_with("[")) else _mistral_call
        if not (yield from read(text, message)):
            message.content(_TOOL_CALLS + blank)


def _mistral_call(text: Text, message: Message) -> Steps[bool]:
    text.mark()
    header = yield from text.while_in(lambda character: character.isalnum() or character in "_-.[]")
    name = _MISTRAL_NAME.fullmatch(header)
    is_call = bool(name and (yield from text.starts_with("{")))
    text.release(rewind=not is_call)
    if name and is_call:
        message.call(name[1])
        yield from read_value(text, message.arguments)
    return is_call


def llama3_json(names: Collection[str]) -> Form:
    """Llama 3: the whole text is `{"name": …, "parameters": …}`, or several with `;` between them; or `<|python_tag|>`
    is in front of it. Without the tag, only an object that names one of the functions is a call.
    """

    def form(text: Text, message: Message) -> Steps[None]:
        is_tagged = False
        while True:
            before = yield from text.blank()
            if not is_tagged and (yield from text.starts_with(_PYTHON_TAG)):
                text.skip(len(_PYTHON_TAG))
                is_tagged = True
                before += yield from text.blank()
            if (yield from read_call(text, message, None if is_tagged else names)):
                is_tagged = False
                yield from text.blank()
                if (yield from text.starts_with(";")):
                    text.skip(1)
                continue
            message.content(before)
            is_tagged = bool((yield from text.until(_PYTHON_TAG, take=message.content)))
            if not is_tagged:
                return

    return form


TOOL_CALL_FORMS: Mapping[str, Callable[[Collection[str]], Form]] = {
    "hermes": lambda names: hermes,
    "llama3_json": llama3_json,
    "mistral": lambda names: mistral,
}
"""vLLM's name of a parser → the form, given the names of the functions. gpt-oss's is `harmony`."""


def named_call(name: str) -> Form:
    """All of it is the arguments of one call: a grammar has made it so."""

    def form(text: Text, message: Message) -> Steps[None]:
        message.call(name)
        yield from text.until(take=message.arguments)

    return form


def required_calls(text: Text, message: Message) -> Steps[None]:
    """All of it is a list of calls: a grammar has made it so."""
    yield from text.blank()
    if not (yield from read_calls(text, message)):
        yield from plain(text, message)


# -- reasoning --------------------------------------------------------------------------------------------------------


def _thinking(body: Form, *, is_open: bool) -> Form:
    """`<think>…</think>` and then something else.

    Args:
        body: what follows.
        is_open: whether the prompt itself ends with `<think>`, so that the text begins with reasoning.
    """

    def form(text: Text, message: Message) -> Steps[None]:
        before = yield from text.blank()
        if (yield from text.starts_with(_THINK)):
            text.skip(len(_THINK))
        elif not is_open:
            message.content(before)
            yield from body(text, message)
            return
        message.reasoning("")
        yield from text.until(_END_THINK, take=message.reasoning)
        yield from body(text, message)

    return form


REASONING_FORMS: Mapping[str, Callable[[Form], Form]] = {
    "deepseek_r1": lambda body: _thinking(body, is_open=True),
    "qwen3": lambda body: _thinking(body, is_open=False),
}
"""vLLM's name of a parser → the form, given that of what follows the reasoning. gpt-oss's is `harmony`."""
