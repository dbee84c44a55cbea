"""A model's text → content, reasoning and tool calls, while it comes.

Each form that models write calls and reasoning in is a `Form`: a generator that reads from a `Text`, which makes it
wait for more, and writes to a `Message`. What it makes of a text never depends on the parts that the text came in, so
streamed and whole answers are parsed by the same code.

    text.py         what has come of the text and was not read yet
    message.py      what was found in it: pieces, which whitespace at their edges does not belong to
    json_text.py    a call in JSON, passed on as it comes
    forms.py        reasoning, and the forms of calls by vLLM's names
    harmony.py      gpt-oss's channels
"""

from quire_gateway.output_parser.forms import REASONING_FORMS, TOOL_CALL_FORMS, named_call, plain, required_calls
from quire_gateway.output_parser.harmony import harmony
from quire_gateway.output_parser.message import Arguments, CallStart, Content, Message, Piece, Reasoning
from quire_gateway.output_parser.text import Form, OutputParser

__all__ = [
    "REASONING_FORMS",
    "TOOL_CALL_FORMS",
    "Arguments",
    "CallStart",
    "Content",
    "Form",
    "Message",
    "OutputParser",
    "Piece",
    "Reasoning",
    "harmony",
    "named_call",
    "plain",
    "required_calls",
]
