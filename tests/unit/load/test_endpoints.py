"""What goes over the wire to each endpoint, and how its errors are told apart."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from quire_cli.main import run
from quire_load.datasets import SampleRequest
from quire_load.endpoint import Chunk, Endpoint, EndpointError
from quire_load.grpc_endpoint import GrpcEndpoint
from quire_load.http_endpoint import GenerateStreamEndpoint, OpenAIChatEndpoint, OpenAIEmbeddingEndpoint, OpenAIEndpoint
from support.fake_triton import MODEL, FakeTriton, fake_triton

REQUEST = SampleRequest(prompt=[5, 6], max_tokens=3, slo_class="chat", lora_name="sql")
TEXT = SampleRequest(prompt="hello", max_tokens=3)
SAMPLING = {"ignore_eos": True}


async def chunks(endpoint: Endpoint, request: SampleRequest = REQUEST) -> list[Chunk]:
    try:
        return [chunk async for chunk in endpoint.generate(request)]
    finally:
        await endpoint.close()


class Web:
    """Answers every POST alike, and keeps what was asked."""

    def __init__(self, events: list[Any], status: int = 200, *, is_stream: bool = True) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: dict[str, str] = {}
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                web.asked.append((self.path, json.loads(body)))
                web.headers = {name.lower(): value for name, value in self.headers.items()}
                self.send_response(status)
                self.end_headers()
                for event in events:
                    line = event if isinstance(event, str) else json.dumps(event)
                    self.wfile.write((f"data: {line}\n\n" if status == 200 and is_stream else line).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def web(*events: Any, status: int = 200, is_stream: bool = True) -> Iterator[Web]:
    made = Web(list(events), status, is_stream=is_stream)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def test_grpc_streams_tokens() -> None:
    async def main(url: str) -> list[Chunk]:
        return await chunks(GrpcEndpoint(url, MODEL, SAMPLING), TEXT)

    with fake_triton() as fake:
        assert asyncio.run(main(fake.url)) == [Chunk(1)] * 4
        assert fake.state.prompts == [("hello", {"ignore_eos": True, "max_tokens": 3})]


def test_a_grpc_server_that_is_away_is_told_from_one_that_refuses() -> None:
    async def main(url: str) -> list[Chunk]:
        return await chunks(GrpcEndpoint(url, MODEL, SAMPLING))

    with fake_triton() as fake:
        url = fake.url
    with pytest.raises(EndpointError) as caught:
        asyncio.run(main(url))
    assert caught.value.kind == "disconnected"


def test_a_grpc_stream_that_is_left_after_its_last_token_is_not_cancelled() -> None:
    async def main(fake: FakeTriton) -> None:
        endpoint = GrpcEndpoint(fake.url, MODEL, SAMPLING)
        answer = endpoint.generate(TEXT)
        for _ in range(4):
            await anext(answer)
        await answer.aclose()
        while not fake.state.were_cancelled:
            await asyncio.sleep(0.01)
        await endpoint.close()

    with fake_triton() as fake:
        fake.state.lingers_s = 0.3
        asyncio.run(asyncio.wait_for(main(fake), 30))
        assert fake.state.were_cancelled == [False]


def test_generate_stream_streams_tokens() -> None:
    async def main(url: str) -> list[Chunk]:
        return await chunks(GenerateStreamEndpoint(url, MODEL, SAMPLING))

    with web(
        {"num_output_tokens": 1, "num_input_tokens": 2}, {"num_output_tokens": [2], "num_input_tokens": 2}
    ) as there:
        assert asyncio.run(main(there.url)) == [Chunk(1, 2), Chunk(2, 2)]
    ((path, body),) = there.asked
    assert path == f"/v2/models/{MODEL}/generate_stream"
    assert json.loads(body.pop("sampling_parameters")) == {"ignore_eos": True, "max_tokens": 3}
    assert body == {"input_ids": [5, 6], "stream": True, "return_num_input_tokens": True,
                    "return_num_output_tokens": True, "slo_class": "chat", "lora_name": "sql"}  # fmt: skip


def test_openai_streams_tokens_and_takes_the_numbers_of_the_usage() -> None:
    async def main(url: str) -> list[Chunk]:
        return await chunks(OpenAIEndpoint(url, MODEL, SAMPLING, {"Authorization": "Bearer key"}))

    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    with web({"choices": [{"text": "a"}]}, {"choices": [{"text": ""}], "usage": None}, usage, "[DONE]") as there:
        assert asyncio.run(main(there.url)) == [Chunk(1), Chunk(0), Chunk(0, 2, 3)]
    assert there.asked == [
        ("/v1/completions", {"prompt": [5, 6], "ignore_eos": True, "model": MODEL, "max_tokens": 3, "stream": True,
                             "stream_options": {"include_usage": True}, "slo_class": "chat", "lora_name": "sql"})
    ]  # fmt: skip
    assert there.headers["authorization"] == "Bearer key"


def test_a_chat_is_one_message() -> None:
    async def main(url: str) -> list[Chunk]:
        return await chunks(OpenAIChatEndpoint(url, MODEL, {}), TEXT)

    with web({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, {"choices": [{"delta": {"content": "a"}}]},
             "[DONE]") as there:  # fmt: skip
        assert asyncio.run(main(there.url)) == [Chunk(0), Chunk(1)]
    ((path, body),) = there.asked
    assert (path, body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "hello"}])


def test_images_follow_the_text_of_a_chat() -> None:
    async def main(url: str) -> list[Chunk]:
        return await chunks(
            OpenAIChatEndpoint(url, MODEL, {}), replace(TEXT, images=[b"one", b"two", [b"one", b"two"]])
        )

    with web({"choices": [{"delta": {"content": "a"}}]}, "[DONE]") as there:
        asyncio.run(main(there.url))
    ((_, body),) = there.asked
    (message,) = body["messages"]
    text, *images, video = message["content"]
    assert video == {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,b25l,dHdv"}}
    assert text == {"type": "text", "text": "hello"}
    assert [image["image_url"]["url"] for image in images] == [
        "data:image/jpeg;base64,b25l", "data:image/jpeg;base64,dHdv",
    ]  # fmt: skip
    assert {image["type"] for image in images} == {"image_url"}


def test_a_load_with_images_sends_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    events = ({"choices": [{"delta": {"content": "a"}}]}, {"choices": [], "usage": {"prompt_tokens": 9}}, "[DONE]")
    with web(*events) as there:
        command = ["bench", "serve", "--model", MODEL, "--backend", "openai-chat", "--base-url", there.url, "--metrics",
                   there.url.removeprefix("http://"), "--dataset-name", "random-mm", "--num-prompts", "5", "--json",
                   "--random-mm-base-items-per-request", "2", "--random-mm-bucket-config",
                   "{(8, 16, 1): 1}"]  # fmt: skip
        assert run(command) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["completed"], values["total_input_tokens"]) == (5, 45)
    contents = [body["messages"][0]["content"] for _, body in there.asked]
    assert [[part["type"] for part in content] for content in contents] == [["text", "image_url", "image_url"]] * 7
    assert len({part["image_url"]["url"] for content in contents for part in content[1:]}) == 14, "also of the warm-up"
    assert len({content[0]["text"][:20] for content in contents}) == 7


def test_other_endpoints_take_no_load_with_images(capsys: pytest.CaptureFixture[str]) -> None:
    for backend in ("grpc", "generate-stream", "openai"):
        command = ["bench", "serve", "--model", MODEL, "--backend", backend, "--dataset-name", "random-mm"]
        assert run(command) == 2
        assert "use quire bench serve with backend openai-chat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "message"),
    [("[1]", "an answer is no JSON object"), ("x", "an answer is not JSON"), ({"error": {"message": "gone"}}, "gone")],
)
def test_an_embedding_is_one_json_object(answer: Any, message: str) -> None:
    async def main(url: str) -> list[Chunk]:
        return await chunks(OpenAIEmbeddingEndpoint(url, MODEL, {"dimensions": 2}), TEXT)

    with web({"data": [{"embedding": "AA"}], "usage": {"prompt_tokens": 3}}, is_stream=False) as there:
        assert asyncio.run(main(there.url)) == [Chunk(0, 3, is_vector=True)]
    sent = {"encoding_format": "base64", "dimensions": 2, "model": MODEL, "input": "hello"}
    assert there.asked == [("/v1/embeddings", sent)]
    with web(answer, is_stream=False) as there, pytest.raises(EndpointError, match=message):
        asyncio.run(main(there.url))


@pytest.mark.parametrize(
    ("status", "event", "kind", "message"),
    [
        (429, {"error": {"message": "too many"}}, "rejected", "too many"),
        (503, {"error": "no place"}, "rejected", "no place"),
        (400, {"error": {"message": "max_tokens is -1"}}, "invalid", "max_tokens is -1"),
        (504, "<html>", "timeout", "status 504: <html>"),
        (500, "", "error", "status 500: "),
        (200, {"error": {"message": "late", "code": 504}}, "timeout", "late"),
        (200, {"error": "gone"}, "error", "gone"),
        (200, "nothing", "error", "an answer is not JSON"),
        (200, "[1]", "error", "an answer is no JSON object"),
    ],
)
def test_errors_of_http_are_told_apart(status: int, event: Any, kind: str, message: str) -> None:
    async def main(url: str) -> list[Chunk]:
        return await chunks(OpenAIEndpoint(url, MODEL, SAMPLING))

    with web(event, status=status) as there, pytest.raises(EndpointError) as caught:
        asyncio.run(main(there.url))
    assert caught.value.kind == kind
    assert str(caught.value).startswith(message)
