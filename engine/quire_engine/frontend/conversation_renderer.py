"""ConversationRenderer: a conversation → its text, by the checkpoint's chat template. Knows no token ids."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire_engine.encoders.video import NO_VIDEOS, Video, named
from quire_engine.errors import RequestError, quote
from quire_engine.frontend.chat_template import ChatTemplateError, ChatTemplateRenderer, Conversation
from quire_engine.frontend.image_parts import PLACE, VIDEO_PLACE, fit_contents, split_images
from quire_engine.frontend.tokenizer import AnyTokenizer

_TEMPLATE_ARGUMENTS = (
    "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
)  # fmt: skip
"""Variables of the template that only the engine sets."""


class ConversationRenderer:
    """Each conversation is rendered in a process; another process starts when all are busy. Thread-safe.

    Args:
        tokenizer: has the template, unless the checkpoint has none.
        placeholders: text of an `image` and a `video` in a prompt; empty: the model takes none, for the reason
            `why_no_images`.
        max_model_len: in tokens; each message has at least one.
        max_characters: of a conversation that can fit.
    """

    def __init__(
        self, tokenizer: AnyTokenizer, placeholders: Mapping[str, str], why_no_images: str, *, max_model_len: int,
        max_characters: int,
    ) -> None:  # fmt: skip
        self._tokenizer, self._placeholders, self._why_no_images = tokenizer, placeholders, why_no_images
        self._max_model_len, self._max_characters = max_model_len, max_characters
        self._lock = threading.Lock()
        self._idle: list[ChatTemplateRenderer] = []
        self._all: list[ChatTemplateRenderer] = []

    def render(self, conversation: Conversation) -> tuple[str, list[Any]]:
        """The text of a conversation, rendered within limits of time and memory, and its images and videos.

        Raises:
            RequestError: the checkpoint has no template, or it rejects the messages, or exceeds the limits.
        """
        name = "messages"
        split, images = self._check(conversation)
        if not self._tokenizer.chat_template:
            raise RequestError.because(name, "the model has no chat template; give a prompt of text instead")
        try:
            template = self._tokenizer.get_chat_template()
            messages = fit_contents(split, template, self._placeholders)
            fitted = msgspec.structs.replace(conversation, messages=messages, images=())
            text = self._render(template, fitted, self._tokenizer.special_tokens_map)
        except (ChatTemplateError, ValueError) as error:  # the latter where there are several
            reason = " ".join(str(error).split())
            raise RequestError.because(name, f"the chat template failed: {reason}") from None
        num_videos = sum(isinstance(image, Video) for image in images)
        for kind, place, number in (("image", PLACE, len(images) - num_videos), ("video", VIDEO_PLACE, num_videos)):
            if not number or text.count(self._placeholders[kind]) >= number:
                continue
            roles = {str(message.get("role")) for message in split
                     if isinstance(message.get("content"), list) and place in message["content"]}  # fmt: skip
            raise RequestError.of(
                name,
                f"holds {kind}s in messages of the role {' and '.join(sorted(roles))}, and the model's chat "
                "template leaves some of them out; give these in a message of the role user",
            )
        return text, images

    def shutdown(self) -> None:
        """End the processes. Idempotent."""
        for renderer in self._all:
            renderer.shutdown()

    def _render(self, *args: Any) -> str:
        with self._lock:
            if self._idle:
                renderer = self._idle.pop()
            else:
                renderer = ChatTemplateRenderer()
                self._all.append(renderer)
        try:
            return renderer.render(*args)
        finally:
            with self._lock:
                self._idle.append(renderer)

    def _check(self, conversation: Conversation) -> tuple[list[Mapping[str, Any]], list[Any]]:
        """As `split_images`. What cannot fit is rejected before it is rendered."""
        name, messages = "messages", conversation.messages
        reserved = next((key for key in conversation.chat_template_kwargs if key in _TEMPLATE_ARGUMENTS), None)
        if reserved is not None:
            kwargs = "chat_template_kwargs"
            raise RequestError.of(kwargs, f"holds {reserved!r}, which a request cannot set")
        for message in messages:
            if not isinstance(message, Mapping):
                raise RequestError.of(name, f"holds {quote(message)}; it must hold objects with role and content")
        if not messages:
            raise RequestError.of(name, "is empty; it must hold at least one message")
        split, images = split_images(messages, conversation.images)
        if images and not self._placeholders:
            raise RequestError.of(name, f"holds {named(images)}; {self._why_no_images}")
        if "video" not in self._placeholders and any(isinstance(image, Video) for image in images):
            raise RequestError.of(name, f"holds a video, which {NO_VIDEOS}")
        if any(isinstance(image, str) for image in images):
            raise RequestError.of(name, "holds the URL of an image, which the engine does not fetch; give a data: URL")
        self._check_size(split)
        return split, images

    def _check_size(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if len(messages) >= self._max_model_len:
            raise RequestError.of(
                "messages",
                f"has {len(messages)} messages, which cannot fit; with max_model_len={self._max_model_len} "
                "it must have fewer than that",
            )
        num_characters = 0
        pending: list[Any] = [message.get("content") for message in messages]
        while pending and num_characters <= self._max_characters:
            value = pending.pop()
            num_characters += len(value) if isinstance(value, str) else 1
            if isinstance(value, list | tuple):
                pending += value
            elif isinstance(value, Mapping):
                pending += value.values()
        if num_characters > self._max_characters:
            raise RequestError.of(
                "messages",
                f"has more than {self._max_characters} characters, which cannot fit "
                f"max_model_len={self._max_model_len} tokens",
            )
