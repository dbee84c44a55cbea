"""Messages with images, as chat templates read them; `LLM.chat` and `AsyncLLM.chat`."""

import asyncio
import base64
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from quire_engine import LLM, AsyncLLM, SamplingParams
from quire_engine.config import EngineConfig
from quire_engine.encoders.video import Video
from quire_engine.errors import RequestError
from quire_engine.frontend.image_parts import PLACE, VIDEO_PLACE, decode_media, fit_contents, split_images
from support.pictures import image_of

TEXT = {"type": "text", "text": "a"}
VIDEO_URL = "data:video/jpeg;fps=4;base64,YQ==,Yg=="
URL = f"data:image/png;base64,{base64.b64encode(b'one').decode()}"


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_images_are_taken_out_in_their_order() -> None:
    messages = [
        {"role": "system", "content": "s"},
        user({"type": "image_url", "image_url": {"url": URL}}, TEXT, PLACE),
        user({"type": "image_pil", "image_pil": 5}, {"type": "input_image", "image_url": "https://a/b"}, PLACE),
        {"role": "assistant", "content": None},
    ]
    split, images = split_images(messages, [b"beside", b"another"])
    assert split == [messages[0], user(PLACE, TEXT, PLACE), user(PLACE, PLACE, PLACE), messages[3]]
    assert images == [b"one", b"beside", 5, "https://a/b", b"another"]


def test_videos_are_taken_out_in_their_order() -> None:
    frames, named = [image_of(4, 5), image_of(4, 5, seed=1)], Video([b"x"], 3.0)
    parts = [
        {"type": "video_url", "video_url": {"url": VIDEO_URL}}, PLACE, {"type": "video", "video": frames}, VIDEO_PLACE,
        {"type": "video", "video": (frames, {"fps": 8})}, {"type": "video_url", "video_url": VIDEO_URL},
        {"type": "video_url", "video_url": "data:image/gif;base64,Yg=="},
    ]  # fmt: skip
    split, found = split_images([user(*parts)], [b"image", named])
    assert split == [user(VIDEO_PLACE, PLACE, *[VIDEO_PLACE] * 5)]
    assert found == [
        Video([b"a", b"b"], 4.0), b"image", Video(frames), named, Video(frames, 8.0), Video([b"a", b"b"], 4.0),
        Video([b"b"]),
    ]  # fmt: skip
    for video in (named, Video([b"a", b"b"]), Video([b"a", b"b"], 29.97)):
        assert decode_media(video.text.encode()) == video, "as the gateway sends it to the server"
    assert decode_media(URL.encode()) == decode_media(URL.partition(",")[2].encode()) == b"one"


@pytest.mark.parametrize(
    ("part", "images", "message"),
    [
        (PLACE, [], r"messages\[0\].content\[0\]: image holds no image"),
        (PLACE, [b"a", b"b"], "1 times fewer than there are images"),
        ({"type": "audio_url", "audio_url": {}}, [], "audio_url parts are not taken"),
        ({"type": "video_url", "video_url": {}}, [], "video_url holds no video"),
        (VIDEO_PLACE, [b"an image"], "video holds no video"),
        (PLACE, [Video([b"a frame"])], "image holds no image"),
        ({"type": "video_url", "video_url": "https://a/b"}, [], "'https://a/b' is no data: URL"),
        ({"type": "video_url", "video_url": VIDEO_URL.replace(";base64", "")}, [], "is no data: URL with base64"),
        ({"type": "video_url", "video_url": VIDEO_URL + ","}, [], "a video cannot be used: the image is empty"),
        ({"type": "video_url", "video_url": VIDEO_URL.replace("fps=4", "fps=0")}, [], "fps is '0'"),
        ({"type": "video_url", "video_url": VIDEO_URL + ",Yg==" * 767}, [], "has 769 frames; at most 768"),
        ({"type": "video", "video": [[b"one"], [b"another"]]}, [], "there are several; give each in a part"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, [], "must be a data: URL"),
    ],
)
def test_what_holds_no_image_is_named(part: Any, images: list[bytes], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        split_images([user(part)], images)
    assert error.value.parameter == "messages"


LOOP = "{% for m in messages %}{% for part in m['content'] %}{{ part }}{% endfor %}{% endfor %}"
BOTH = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part }}{% endfor %}{% endif %}"
)
PLAIN = "{% for m in messages %}{% for line in m['content'].splitlines() %}{{ line }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text", "images"),
    [
        (LOOP, [TEXT], [PLACE, TEXT, VIDEO_PLACE]),
        (BOTH, "a", [PLACE, TEXT, VIDEO_PLACE]),
        (PLAIN, "a", "<i>\n<v>\na"),
    ],
    ids=["parts", "both", "texts"],
)
def test_contents_are_what_a_template_reads(template: str, text: Any, images: Any) -> None:
    messages = [{"role": "user", "content": "a"}, user(PLACE, TEXT, VIDEO_PLACE), user(TEXT), {"role": "user"}]
    placeholders = {"image": "<i>", "video": "<v>"}
    contents = [message.get("content") for message in fit_contents(messages, template, placeholders)]
    assert contents == [text, images, "a" if template == PLAIN else [TEXT], None]


def test_chats_with_images(picture_checkpoint: Callable[[str], Path]) -> None:
    folder = picture_checkpoint("smolvlm")
    image, file = Image.fromarray(image_of(40, 30)), BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    turns = [[user({"type": "image_url", "image_url": {"url": url}}, TEXT)],
             [user({"type": "image_pil", "image_pil": image}, TEXT)], [user(TEXT)]]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=4)
    settings: dict[str, Any] = {"max_model_len": 768, "dtype": "float32", "kv_cache_memory_bytes": 2**22}
    llm = LLM(folder, **settings)
    try:
        first, second, plain = llm.chat(turns, params, use_tqdm=False)
        with pytest.raises(RequestError, match="the URL of an image, which the engine does not fetch"):
            llm.chat([user({"type": "image_url", "image_url": {"url": "https://a/b.png"}})], params, use_tqdm=False)
        tool = {"role": "tool", "content": [TEXT, {"type": "image_url", "image_url": {"url": url}}]}
        (answered,) = llm.chat([user(TEXT), tool], params, use_tqdm=False)
        tokenizer = llm._inputs.tokenizer
        tokenizer.chat_template = tokenizer.get_chat_template().replace("in messages", "in messages[:1]", 1)
        with pytest.raises(RequestError, match="in messages of the role tool, and the model's chat template leaves"):
            llm.chat([user(TEXT), tool], params, use_tqdm=False)
    finally:
        llm.shutdown()
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert len(answered.prompt_token_ids) > len(first.prompt_token_ids) > len(plain.prompt_token_ids)

    async def chat() -> list[int]:
        engine = AsyncLLM(EngineConfig.from_settings({"model": str(folder), **settings}))
        try:
            return [output async for output in engine.chat(turns[0], params)][-1].outputs[0].token_ids
        finally:
            engine.shutdown()

    assert asyncio.run(asyncio.wait_for(chat(), 120)) == first.outputs[0].token_ids
