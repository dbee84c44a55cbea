"""A chat as a prompt: by the checkpoint's own template, or in formats that models are commonly trained with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

OWN_TEMPLATE = "The model's own"
"""Which the server applies."""
FORMATS = {
    "Plain": ("{role}: {text}\n", "assistant:"),
    "ChatML": ("<|im_start|>{role}\n{text}<|im_end|>\n", "<|im_start|>assistant\n"),
    "Llama 3": (
        "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
}
"""By name: a turn, and what the answer begins after."""

STOPS = {"Plain": "\nuser:", "ChatML": "<|im_end|>", "Llama 3": "<|eot_id|>"}
"""What an answer ends with."""


class Turn(NamedTuple):
    """A message of a chat."""

    role: str
    """`user` or `assistant`."""
    text: str
    images: Sequence[tuple[str, bytes]] = ()
    """Files: names and contents."""


def chat_prompt(turns: Sequence[Turn], format_: str) -> str:
    """The prompt for the next answer.

    Args:
        turns: the last one by the user.
        format_: a key of `FORMATS`.
    """
    turn, answer = FORMATS[format_]
    # Not str.format: a turn may contain braces.
    return "".join(turn.replace("{role}", said.role).replace("{text}", said.text) for said in turns) + answer


def chat_request(turns: Sequence[Turn], format_: str) -> tuple[str | list[dict[str, Any]], list[str]]:
    """The prompt of a request for the next answer, text or a conversation, and the strings that end it.

    Args:
        turns: the last one by the user. Only `OWN_TEMPLATE` has places for images.
        format_: `OWN_TEMPLATE`, or a key of `FORMATS`.
    """
    if format_ == OWN_TEMPLATE:
        return [{"role": turn.role, "content": _content(turn)} for turn in turns], []
    return chat_prompt(turns, format_), [STOPS[format_]]


def _content(turn: Turn) -> str | list[dict[str, str]]:
    if not turn.images:
        return turn.text
    return [*({"type": "image"} for _ in turn.images), {"type": "text", "text": turn.text}]
