"""Tokens of a text or a conversation, and the text of tokens, without generating.

A request with the parameter `task` is answered once, with JSON in `text_output`, and counts in no metric::

    task = "tokenize"      text_input or messages   → {"tokens": […], "token_strs": […], "max_model_len": …}
    task = "detokenize"    input_ids                → {"prompt": "…"}
    add_special_tokens     with tokenize and text_input: whether the tokens are those of a prompt's beginning; else true
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from quire_engine.errors import MAX_QUOTED, RequestError, quote
from quire_engine.frontend.chat_template import Conversation
from quire_engine.pooling import TASKS

from quire_backend.request import Embeds, LongConversation, Prompt, decode_images, parse_images, parse_prompt
from quire_backend.triton_api import TritonRequest, request_parameters

if TYPE_CHECKING:
    from quire_engine.frontend.input_processor import InputProcessor

_TASKS = ("tokenize", "detokenize")
_OTHER_TASKS = ("generate", *TASKS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizationRequest:
    """What is asked for: the tokens of a text or conversation, or the text of tokens."""

    prompt: Prompt
    add_special_tokens: bool = True
    images: Sequence[bytes] = ()


def parse_tokenization(request: TritonRequest) -> TokenizationRequest | None:
    """Read any request; None if it asks for nothing of the kind.

    Raises:
        RequestError: it asks for an unknown task, or has the wrong input for it.
    """
    parameters = request_parameters(request)
    if '"task"' not in parameters:  # cheaper than to parse them all
        return None
    values: dict[str, Any] = json.loads(parameters)
    if "task" not in values:
        return None
    task, add_special_tokens = values["task"], values.get("add_special_tokens", True)
    if task in _OTHER_TASKS:
        return None
    if task not in _TASKS:
        raise RequestError("task", f"task is {quote(task)}; it must be one of {', '.join((*_TASKS, *_OTHER_TASKS))}")
    for name in values:
        if name not in ("task", "add_special_tokens", "id") and not name.startswith("triton_"):
            raise RequestError(name, f"{name[:MAX_QUOTED]} has no meaning in a request with task")
    if not isinstance(add_special_tokens, bool):
        raise RequestError(
            "add_special_tokens", f"add_special_tokens is {quote(add_special_tokens)}; it must be true or false"
        )
    prompt = parse_prompt(request)
    if isinstance(prompt, Embeds) or isinstance(prompt, list) != (task == "detokenize"):
        allowed = "input_ids" if task == "detokenize" else "text_input or messages"
        raise RequestError("task", f"task is {task}; it must be given with {allowed}")
    images = parse_images({tensor.name(): tensor for tensor in request.inputs()}, prompt)
    if images and not isinstance(prompt, Conversation | LongConversation):
        raise RequestError("image", "image is given with task; then it must be beside messages")
    return TokenizationRequest(prompt=prompt, add_special_tokens=add_special_tokens, images=images)


def answer_tokenization(request: TokenizationRequest, tokenizer: "InputProcessor") -> dict[str, Any]:
    """What the model answers.

    Args:
        request: what is asked for.
        tokenizer: the engine's.

    Raises:
        RequestError: the text is too long, the template rejects the conversation, or a token does not exist.
    """
    prompt = request.prompt
    if isinstance(prompt, list):
        tokenizer.token_strings(prompt)
        return {"prompt": tokenizer.decode(prompt)}
    assert not isinstance(prompt, Embeds)
    if isinstance(prompt, LongConversation):
        prompt = prompt.parse(tokenizer.max_model_len)
    if isinstance(prompt, Conversation):
        images = decode_images(request.images)
        prompt = msgspec.structs.replace(prompt, images=images) if images else prompt
        rendered = tokenizer.apply_chat_template(prompt)
        tokens = rendered if isinstance(rendered, list) else tokenizer.expand_images(rendered)
    else:
        tokens = tokenizer.tokenize(prompt, add_special_tokens=request.add_special_tokens)
    names = tokenizer.token_strings(tokens)
    return {"tokens": tokens, "token_strs": names, "max_model_len": tokenizer.max_model_len}
