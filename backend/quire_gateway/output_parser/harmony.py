"""gpt-oss's format: messages in channels (https://cookbook.openai.com/articles/openai-harmony).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>{…}<|call|>

The prompt ends with `<|start|>assistant`, so the text begins within a header.
"""

import re

from quire_gateway.output_parser.message import Message
from quire_gateway.output_parser.text import Form, Steps, Text

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_HEADER_BEGINS = ("<|channel|>", "<|constrain|>", _MESSAGE, " to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_BREAK = "\n\n"
"""Between two messages of one kind."""


def harmony(has_tools: bool) -> Form:
    """The channel `analysis` is reasoning, a message to a function is a call, and all else is content.

    Args:
        has_tools: whether there is any function to call; else there are no calls.
    """

    def form(text: Text, message: Message) -> Steps[None]:
        is_in_header = bool((yield from text.starts_with(*_HEADER_BEGINS)))
        while True:
            header: list[str] = []
            if is_in_header and not (yield from text.until(_MESSAGE, take=header.append)):
                return
            end = yield from _body("".join(header), text, message, has_tools)
            if end is not None and end != _START:
                end = yield from text.until(_START, take=lambda part: None)
            if end is None:
                return
            is_in_header = True

    return form


def _body(header: str, text: Text, message: Message, has_tools: bool) -> Steps[str | None]:
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if recipient and has_tools:
        message.call(recipient[1])
        return (yield from text.until(*_ENDS, take=message.arguments))
    take = message.reasoning if channel and channel[1] == "analysis" else message.content
    if header:
        message.reasoning("")
        take(_BREAK)
    return (yield from text.until(*_ENDS, take=take))
