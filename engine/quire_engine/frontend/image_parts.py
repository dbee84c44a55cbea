"""Images and videos in the messages of a conversation: they are taken out, and the chat template gets their places."""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire_engine.encoders.embeds import ROWS, ImageEmbeds, read_embeds
from quire_engine.encoders.video import Video, read_url, read_videos
from quire_engine.errors import RequestError, quote
from quire_engine.frontend.tensor_files import read_tensor

PLACE, VIDEO_PLACE = {"type": "image"}, {"type": "video"}
"""What is left of an image in a message, and of a video."""
_KINDS = ("image", ROWS, "image_pil", "image_url", "input_image")
"""Types of parts: transformers' and vLLM's, vLLM's for hidden states and for Pillow's images, OpenAI's of chats, and of
responses."""
_VIDEO_KINDS = ("video", "video_url")
"""The same of videos; vLLM's of chats."""
_ABSENT = ("audio", "audio_url", "input_audio")
_DETAILS = (None, "auto", "low", "high", "original")
"""OpenAI's; the model's own settings decide how large an image becomes."""
_LOOP = re.compile(r"\bfor\s+\w+\s+in\s+(?:\w+(?:\.content\b|\[['\"]content['\"]\])|content\b)(?!\s*[.\[(])")
_IS_STRING = re.compile(r"\bis\s+(?:not\s+)?string\b")


def split_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] = ()
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Messages with `PLACE` for each image and `VIDEO_PLACE` for each video, and these in the order of their places.

    Args:
        messages: their content is a text, or a list of parts.
        images: those of places that hold none themselves.

    Returns:
        Images of `data:` URLs are bytes, those of other URLs texts, those whose hidden states are given `ImageEmbeds`;
        videos are `Video`s.

    Raises:
        RequestError: a part holds no image, or there are not as many `images` as places for them.
    """
    beside, found, split = iter(images), [], []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts: list[Any] = []
            for i, part in enumerate(content):
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind in _ABSENT:
                    raise RequestError("messages", f"messages[{number}].content[{i}]: {kind} parts are not taken")
                if kind in _KINDS or kind in _VIDEO_KINDS:
                    place, is_video = f"messages[{number}].content[{i}]", kind in _VIDEO_KINDS
                    image = read_image(part, place)
                    image = next(beside, None) if image is None else image
                    if image is None or isinstance(image, Video) != is_video:
                        raise RequestError("messages", f"{place}: {kind} holds no {'video' if is_video else 'image'}")
                    found.append(image)
                    part = VIDEO_PLACE if is_video else PLACE
                parts.append(part)
            message = {**message, "content": parts}
        split.append(message)
    if (num_left := sum(1 for _ in beside)) > 0:
        raise RequestError("messages", f'messages has {{"type": "image"}} {num_left} times fewer than there are images')
    return split, found


def read_image(part: Mapping[str, Any], place: str, name: str = "messages") -> Any:
    """The image of a part: bytes of a `data:` URL, another URL as it is, `ImageEmbeds`, or what is no text; or its
    video; None: it holds none.

    Args:
        part: of a content.
        place: of the part, in errors.
        name: of the parameter that is wrong then.

    Raises:
        RequestError: it holds no image.
    """
    kind = part["type"]
    if kind == ROWS and part.get(ROWS) is not None:
        return _read_embeds(part[ROWS], place, name)
    value: Any = part.get("image_url" if kind == "input_image" else kind)
    detail = value.get("detail") if isinstance(value, Mapping) else part.get("detail")
    value = value.get("url") if isinstance(value, Mapping) else value
    if detail not in _DETAILS:
        raise RequestError(name, f"{place}: detail is {quote(detail)}; it must be auto, low, high or original")
    if value is None and kind in ("image", "video"):
        return None
    if value is None or (isinstance(value, str) and not value):
        raise RequestError(name, f"{place}: {kind} holds no {'video' if kind in _VIDEO_KINDS else 'image'}")
    if kind == "video_url" and not isinstance(value, str | Video):
        raise RequestError(name, f"{place}: video_url must be a data: URL, or an object with url")
    if kind in _VIDEO_KINDS:
        return _read_video(value, place, name)
    if not isinstance(value, str):
        return value
    scheme = value[:8].partition(":")[0].lower()
    if scheme in ("http", "https"):
        return value
    if scheme != "data":
        raise RequestError(name, f"{place}: {kind} is {quote(value)}; it must be a data: URL with base64, or http(s)")
    head, comma, data = value.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(name, f"{place}: {kind} is a data: URL without base64; it must be data:image/…;base64,…")
    try:
        return decode_base64(data)
    except ValueError as error:
        raise RequestError(name, f"{place}: {error}") from None


def _read_video(value: Any, place: str, name: str) -> Video:
    try:
        videos = [read_url(value, decode_base64)] if isinstance(value, str) else read_videos(value)
        if len(videos) > 1:
            raise ValueError("there are several; give each in a part")
    except ValueError as error:
        reason = str(error).removeprefix("multi_modal_data: ")
        raise RequestError(name, f"{place}: a video cannot be used: {reason}") from None
    return videos[0]


def _read_embeds(value: Any, place: str, name: str) -> ImageEmbeds:
    try:
        return read_embeds(_tensors(value))
    except ValueError as error:
        reason = str(error).removeprefix("multi_modal_data: ")
        raise RequestError(name, f"{place}: {ROWS} cannot be used: {reason}") from None


def _tensors(value: Any) -> Any:
    """A tensor, or tensors by their names, where texts are files in base64. Raises ValueError: one is none."""
    if isinstance(value, Mapping):
        return {name: read_tensor(one) if isinstance(one, str) else one for name, one in value.items()}
    return read_tensor(value) if isinstance(value, str) else value


def decode_media(text: bytes) -> bytes | Video | ImageEmbeds:
    """An image in base64, the image or video of a `data:` URL, or in JSON the hidden states of an image: of each tensor
    the name and a file in base64.

    Raises:
        ValueError: it is none.
    """
    if text.startswith(b"{"):
        try:
            files = msgspec.json.decode(text, type=dict[str, str])
        except ValueError as error:
            raise ValueError(f"{ROWS} are no JSON object of texts: {error}") from None
        return read_embeds(_tensors(files))
    if not text.startswith(b"data:"):
        return decode_base64(text)
    url = text.decode(errors="replace")
    head, _, data = url.partition(",")
    return decode_base64(data) if head.lower().startswith("data:image/") else read_url(url, decode_base64)


def decode_base64(text: str | bytes) -> bytes:
    """The bytes of base64, which may have line breaks.

    Raises:
        ValueError: it is none, or empty.
    """
    try:
        content = base64.b64decode(
            "".join(text.split()) if isinstance(text, str) else b"".join(text.split()), None, True
        )
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the image is not base64: {error}") from None
    if not content:
        raise ValueError("the image is empty")
    return content


def fit_contents(
    messages: Sequence[Mapping[str, Any]], template: str, placeholders: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """Messages with contents as a chat template reads them: it loops over their parts, or writes them as texts. Of a
    list, the latter kind gets the placeholders of its images and videos, and then its texts, a line each, as in vLLM.

    Args:
        messages: from `split_images`.
        template: in Jinja.
        placeholders: text of an `image`, and of a `video`; those that are missing are not taken.
    """
    takes_parts = _LOOP.search(template) is not None
    takes_text = not takes_parts or _IS_STRING.search(template) is not None

    def fit(content: Any) -> Any:
        if isinstance(content, str) and not takes_text:
            return [{"type": "text", "text": content}]
        if takes_parts or not isinstance(content, list):
            return content
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        places = [placeholders.get(part["type"]) for part in content if part in (PLACE, VIDEO_PLACE)]
        if len(texts) + len(places) < len(content) or None in places:
            return content
        return "\n".join([*filter(None, places), *texts])

    return [{**message, "content": fit(message["content"])} if message.get("content") else message
            for message in messages]  # fmt: skip
