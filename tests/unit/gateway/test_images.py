"""Images in bodies of chats, responses and messages: what the model is sent, and what is never fetched."""

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from quire_engine.encoders.embeds import ImageEmbeds
from quire_engine.encoders.video import Video
from quire_engine.frontend.image_parts import decode_media
from quire_gateway import media
from quire_gateway.errors import InvalidRequestError
from quire_gateway.media import Media, is_public
from safetensors.numpy import save
from support.gateway import ask, gateway, response

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FILES = [b"\x89PNG one", b"two" * 999]
CODES = [base64.b64encode(file).decode() for file in FILES]
URLS = [f"data:image/png;base64,{code}" for code in CODES]


def body(path: str, parts: list[Any]) -> dict[str, Any]:
    turn = [{"role": "user", "content": parts}]
    more = {CHAT: {"messages": turn}, RESPONSES: {"input": turn}, MESSAGES: {"messages": turn, "max_tokens": 9}}
    return {"model": "m", **more[path]}


def block(data: Any, kind: str = "base64") -> dict[str, Any]:
    name = {"base64": "data", "url": "url"}.get(kind, kind)
    return {"type": "image", "source": {"type": kind, "media_type": "image/png", name: data}}


def inputs(request: Any) -> tuple[Any, list[Any]]:
    """The conversation and the images and videos of a request."""
    contents = dict(zip([item.name for item in request.inputs], request.raw_input_contents, strict=True))
    images: list[Any] = []
    position = 0
    while position < len(contents.get("image", b"")):
        (size,) = struct.unpack_from("<I", contents["image"], position)
        images.append(decode_media(contents["image"][position + 4 : position + 4 + size]))
        position += 4 + size
    return json.loads(contents["messages"][4:]), images


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (CHAT, [{"type": "image_url", "image_url": {"url": URLS[0], "detail": "low"}}, {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": URLS[1]}, {"type": "text", "text": "b"}]),
        (RESPONSES, [{"type": "input_image", "image_url": URLS[0], "detail": "auto"},
                     {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URLS[1]},
                     {"type": "input_text", "text": "b"}]),
        (MESSAGES, [block(CODES[0]), {"type": "text", "text": "a"}, block(CODES[1]), {"type": "text", "text": "b"}]),
    ],
)  # fmt: skip
def test_images_travel_beside_the_messages(path: str, parts: list[Any]) -> None:
    answer, (request,) = ask(path, body(path, parts))
    assert answer.status == 200
    place, texts = {"type": "image"}, [{"type": "text", "text": text} for text in "ab"]
    turn = {"role": "user", "content": [place, texts[0], place, texts[1]]}
    assert inputs(request) == ({"messages": [turn]}, FILES)


def test_videos_travel_beside_the_messages() -> None:
    url = f"data:video/jpeg;fps=4;base64,{','.join(CODES)}"
    parts = [
        {"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": URLS[0]},
        {"type": "video_url", "video_url": f"data:image/gif;base64,{CODES[1]}"},
    ]  # fmt: skip
    answer, (request,) = ask(CHAT, body(CHAT, parts))
    assert answer.status == 200
    places = [{"type": "video"}, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}]
    expected = [Video(FILES, 4.0), FILES[0], Video(FILES[1:])]
    assert inputs(request) == ({"messages": [{"role": "user", "content": places}]}, expected)


def test_hidden_states_travel_beside_the_messages() -> None:
    rows, grid = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([[1, 4, 6]])
    code, sizes = (base64.b64encode(save({"x": tensor})).decode() for tensor in (rows, grid))
    given: list[Any] = [code, {"image_embeds": code, "image_grid_thw": sizes}]
    parts = [{"type": "image_embeds", "image_embeds": value} for value in given]
    answer, (request,) = ask(CHAT, body(CHAT, [parts[0], {"type": "text", "text": "a"}, parts[1]]))
    assert answer.status == 200
    conversation, images = inputs(request)
    content = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    assert conversation == {"messages": [{"role": "user", "content": content}]}
    assert all(isinstance(image, ImageEmbeds) and (image.rows == rows).all() for image in images)
    assert [{name: one.tolist() for name, one in image.sizes.items()} for image in images] == [
        {}, {"image_grid_thw": [[1, 4, 6]]},
    ]  # fmt: skip
    for value in ("x", {"image_embeds": sizes}, {"image_grid_thw": sizes}, [[0.5]], None):
        answer, requests = ask(CHAT, body(CHAT, [{"type": "image_embeds", "image_embeds": value}]))
        error = answer.json["error"]
        assert (answer.status, error["param"], requests) == (400, "messages", [])
        assert error["message"].startswith("messages[0].content[0]: image_embeds ")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://a/b.gif", "'https://a/b.gif' is no data: URL with base64"),
        ({"url": "data:video/mp4,x"}, "is no data: URL with base64"),
        ({"url": "data:video/jpeg;base64,a"}, "the image is not base64"),
        ({"url": 5}, "video_url must be a data: URL, or an object with url"),
        ([[1, 2]], "video_url must be a data: URL, or an object with url"),
        (None, "video_url holds no video"),
    ],
)
def test_what_is_no_video_is_rejected_by_its_place(value: Any, message: str) -> None:
    answer, requests = ask(CHAT, body(CHAT, [{"type": "video_url", "video_url": value}]))
    error = answer.json["error"]
    assert (answer.status, error["param"], requests) == (400, "messages", [])
    assert error["message"].startswith("messages[0].content[0]")
    assert message in error["message"]


def test_turns_of_one_role_are_joined_with_their_images() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": [block(CODES[0])]},
             {"role": "user", "content": "b"}]  # fmt: skip
    answer, (request,) = ask(MESSAGES, {"model": "m", "max_tokens": 9, "messages": turns})
    assert answer.status == 200
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert inputs(request) == ({"messages": [{"role": "user", "content": content}]}, FILES[:1])


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (CHAT, {"role": "tool", "tool_call_id": "c", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": URLS[0]}}]}),
        (RESPONSES, {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URLS[0]}]}),
        (MESSAGES, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
            {"type": "text", "text": "a"}, block(CODES[0])]}]}),
    ],
)  # fmt: skip
def test_the_result_of_a_tool_may_have_images(path: str, answer: dict[str, Any]) -> None:
    said = body(path, [])
    said["input" if path == RESPONSES else "messages"] = [{"role": "user", "content": "b"}, answer]
    got, (request,) = ask(path, said)
    assert got.status == 200
    content = [{"type": "text", "text": "a"}, {"type": "image"}]
    result = {"role": "tool", "tool_call_id": "c", "content": content}
    assert inputs(request) == ({"messages": [{"role": "user", "content": "b"}, result]}, FILES[:1])


def test_a_tools_error_with_an_image_says_so() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [block(CODES[0])]}
    answer, (request,) = ask(MESSAGES, body(MESSAGES, [result]))
    assert answer.status == 200
    content = [{"type": "text", "text": "Error:"}, {"type": "image"}]
    assert inputs(request) == ({"messages": [{"role": "tool", "tool_call_id": "c", "content": content}]}, FILES[:1])


NOT_BASE64, NOT_ALLOWED = "is not base64", "its host is not one of allowed_media_domains (none)"
BAD_URLS = {
    "data:image/png,iVBORw0KGgo": "is a data: URL without base64",
    "data:image/png;base64": "is a data: URL without base64",
    "data:": "is a data: URL without base64",
    "data:image/png;base64,": "the image is empty",
    "data:image/png;base64,abc": NOT_BASE64,
    "data:image/png;base64,ab-_": NOT_BASE64,
    "data:image/png;base64,é": NOT_BASE64,
    f"data:image/png;base64,{URLS[0]}": NOT_BASE64,
    "": "holds no image",
    "iVBORw0KGgo=": "it must be a data: URL",
    "/etc/passwd": "it must be a data: URL",
    "file:///etc/passwd": "it must be a data: URL",
    "ftp://example.com/a.png": "it must be a data: URL",
    "gopher://127.0.0.1:6379/_x": "it must be a data: URL",
    "blob:https://example.com/1": "it must be a data: URL",
    "javascript:alert(1)": "it must be a data: URL",
    "http://example.com/a.png": NOT_ALLOWED,
    "HTTPS://example.com/a.png": NOT_ALLOWED,
    "http://127.0.0.1/": NOT_ALLOWED,
    "http://[::1]:8000/": NOT_ALLOWED,
    "http://169.254.169.254/latest/meta-data": NOT_ALLOWED,
    "http://": "the URL must be http(s)://",
    "http://a:b@example.com/": "the URL must be http(s)://",
    "http://example.com\\@127.0.0.1/": "the URL must be http(s)://",
    "http://exam ple.com/": "the URL must be http(s)://",
    "http://example.com:99999/": "Port out of range",
    "http://[::1/": "Invalid IPv6 URL",
}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("url", BAD_URLS)
def test_a_bad_url_is_named_and_nothing_is_sent(path: str, url: str) -> None:
    kind = {CHAT: "image_url", RESPONSES: "input_image"}[path]
    answer, requests = ask(path, body(path, [{"type": kind, "image_url": url}]))
    error = answer.json["error"]
    assert (answer.status, requests) == (400, [])
    assert error["param"] == {CHAT: "messages", RESPONSES: "input"}[path]
    assert BAD_URLS[url] in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("path", "part", "message"),
    [
        (CHAT, {"type": "image_url"}, "holds no image"),
        (CHAT, {"type": "image_url", "image_url": 5}, "image_url must be a URL"),
        (CHAT, {"type": "image_url", "image_url": {"url": None}}, "holds no image"),
        (CHAT, {"type": "image_url", "image_url": {"url": [URLS[0]]}}, "image_url must be a URL"),
        (CHAT, {"type": "image_url", "image_url": {"url": URLS[0], "detail": "most"}}, "detail is 'most'"),
        (CHAT, {"type": "image"}, "image parts are not offered"),
        (CHAT, {"type": "image_pil", "image_pil": URLS[0]}, "image_pil parts are not offered"),
        (RESPONSES, {"type": "input_image", "file_id": "x"}, "holds no image"),
        (MESSAGES, block("x"), NOT_BASE64),
        (MESSAGES, block(""), "the image is empty"),
        (MESSAGES, block(None), "source must be"),
        (MESSAGES, block(URLS[0], "url"), "source must be"),
        (MESSAGES, block("x", "file"), "source must be"),
        (MESSAGES, {"type": "image"}, "source must be"),
        (MESSAGES, block("http://example.com", "url"), NOT_ALLOWED),
    ],
)  # fmt: skip
def test_a_bad_part_is_named(path: str, part: Any, message: str) -> None:
    answer, requests = ask(path, body(path, [part]))
    assert (answer.status, requests) == (400, [])
    assert message in answer.json["error"]["message"]


def test_vectors_are_of_text_alone() -> None:
    answer, requests = ask("/v1/embeddings", body(CHAT, [{"type": "image_url", "image_url": URLS[0]}]))
    assert (answer.status, answer.json["error"]["param"], requests) == (400, "messages", [])
    assert "vectors are of text alone" in answer.json["error"]["message"]


def test_an_image_of_20_mb_is_too_large_by_default() -> None:
    large = body(CHAT, [{"type": "image_url", "image_url": f"data:;base64,{'A' * 20_000_000}"}])
    answer, requests = ask(CHAT, large)
    assert (answer.status, requests) == (413, [])
    assert "the body is larger than 16777216 bytes" in answer.json["error"]["message"]


# -- fetching ---------------------------------------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def fetched(url: str, serve: Serve, *, max_bytes: int = 100_000, domains: tuple[str, ...] = ("localhost",)) -> Any:
    """What is fetched from a server; `PORT` in the URL is its port."""

    async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await serve(reader, writer)
        writer.close()

    async def go() -> Any:
        async with await asyncio.start_server(serve_once, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            prompt = {"messages": [], "images": [FILES[1], url.replace("PORT", str(port))]}
            return await Media(domains, max_bytes).fetch(prompt, "messages")

    return asyncio.run(asyncio.wait_for(go(), 20))["images"]


def answering(content: bytes) -> Serve:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()

    return serve


@pytest.fixture
def local_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "is_public", lambda address: True)


URL = "http://localhost:PORT/a.png?b=1"


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\ncontent-type: text/html\r\n\r\n" + FILES[0],
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n\x89PN\r\n5\r\nG one\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n" + FILES[0],
    ],
    ids=["length", "chunks", "to the end"],
)
def test_an_image_of_an_allowed_domain_is_fetched(content: bytes) -> None:
    file, image = fetched(URL, answering(content))
    assert file == FILES[1]
    assert image == FILES[0]


async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
    await reader.read()  # until the client leaves


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (answering(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\n\r\n"), "302; redirects are not followed"),
        (answering(b"HTTP/1.1 301 Moved\r\nlocation: http://localhost/\r\n\r\n"), "301; redirects are not followed"),
        (answering(b"HTTP/1.1 404 Not Found\r\n\r\n"), "status is 404"),
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 999999\r\n\r\n" + bytes(200_000)), "may have 100000 bytes"),
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nshort"), "without sending complete message body"),
        (answering(b"SSH-2.0-OpenSSH_9\r\n\r\n"), "cannot be fetched"),
        (answering(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50_000), "cannot be fetched"),
        (answering(b""), "cannot be fetched"),
        (slow, "it takes more than 0 s"),
    ],
    ids=["302", "301", "404", "large", "short", "ssh", "headers", "nothing", "slow"],
)
def test_what_cannot_be_fetched_is_named(serve: Serve, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if serve is slow:
        monkeypatch.setattr(media, "FETCH_SECONDS", 0.2)
    with pytest.raises(InvalidRequestError, match=message) as error:
        fetched(URL, serve)
    assert error.value.param == "messages"


PRIVATE = (
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "192.0.2.1", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd00:ec2::254", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
    "2001:0:7f00:1::", "ff02::1", "2001:db8::1",
)  # fmt: skip


def test_private_addresses_are_not_public() -> None:
    assert [address for address in PRIVATE if is_public(address)] == []
    assert all(map(is_public, ("8.8.8.8", "151.101.1.1", "2606:4700::1111")))


@pytest.mark.parametrize("address", PRIVATE)
def test_an_allowed_domain_that_resolves_to_a_private_address_is_not_connected_to(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80)) for ip in ("8.8.8.8", address)]

    async def connect(*_: Any, **__: Any) -> Any:
        raise AssertionError("it connects")

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    prompt = {"images": ["http://images.example/a.png"]}
    with pytest.raises(InvalidRequestError, match="its address is not a public one"):
        asyncio.run(Media(("images.example",), 1000).fetch(prompt, "messages"))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "localhost",
     "images.example.evil.com", "evil.images.example", "images.example.", "xn--mges-goa.example", "0", "①②⑦.0.0.1"],
)  # fmt: skip
def test_another_host_is_not_resolved(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: Any, **__: Any) -> Any:
        raise AssertionError("it resolves")

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", resolve)
    with pytest.raises(InvalidRequestError, match=r"allowed_media_domains \(images.example\)|in ASCII"):
        asyncio.run(Media(("images.example",), 1000).fetch({"images": [f"http://{host}/a.png"]}, "messages"))


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/messages/count_tokens", "/tokenize"])
def test_a_fetched_image_travels_as_a_sent_one(path: str) -> None:
    part = {CHAT: {"type": "image_url", "image_url": {"url": URL}}, MESSAGES: block(URL, "url"),
            RESPONSES: {"type": "input_image", "image_url": URL}}  # fmt: skip
    kind = CHAT if path == "/tokenize" else MESSAGES if path.startswith(MESSAGES) else path

    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        yield response(json.dumps({"tokens": [1], "token_strs": ["a"], "max_model_len": 9}), "stop")

    async def image(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answering(b"HTTP/1.0 200 OK\r\n\r\n" + FILES[0])(reader, writer)
        writer.close()

    async def go() -> tuple[int, Any]:
        async with (
            await asyncio.start_server(image, "127.0.0.1", 0) as server,
            gateway(serve, allowed_media_domains=("localhost",)) as (app, triton),
        ):
            port = str(server.sockets[0].getsockname()[1])
            said = json.loads(json.dumps(body(kind, [part[kind]])).replace("PORT", port))
            if path.endswith("count_tokens"):
                del said["max_tokens"]
            answer = await app.call(path, said)
            return answer.status, triton.requests[-1]

    status, request = asyncio.run(asyncio.wait_for(go(), 20))
    assert status == 200
    assert inputs(request) == ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, FILES[:1])
