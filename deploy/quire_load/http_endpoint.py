"""Models behind HTTP that stream server-sent events: Triton's `generate_stream`, and OpenAI's API."""

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import aiohttp

from quire_load.datasets import SampleRequest
from quire_load.endpoint import Chunk, EndpointError, kind_of_status

MOST_QUOTED = 300
"""Characters of an error that is not JSON."""


class _HttpEndpoint(ABC):
    """An `Endpoint` that answers a POST with events.

    Args:
        url: of the server, http://HOST:PORT.
        model: its name.
        sampling: further fields of every request.
        headers: of every request.
    """

    _is_json = False
    """Whether the answer is one JSON object, and no stream of events."""

    def __init__(
        self, url: str, model: str, sampling: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = url.rstrip("/") + self._path(model)
        self._model = model
        self._sampling = sampling
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=headers
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def generate(self, request: SampleRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one answer. Closing the iterator early closes the connection.

        Raises:
            EndpointError: it has failed.
        """
        body = self._body(request) | request.names
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    content = await response.text(errors="replace")
                    raise EndpointError(kind_of_status(response.status), _message(content, response.status))
                if self._is_json:
                    yield self._chunk(_event(await response.read()))
                    return
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data and data != b"[DONE]":
                        yield self._chunk(_event(data))
        except aiohttp.ClientError as error:
            raise EndpointError("disconnected", str(error) or type(error).__name__) from None
        except ValueError as error:  # a line that is too long
            raise EndpointError("error", str(error)) from None

    @abstractmethod
    def _path(self, model: str) -> str: ...

    @abstractmethod
    def _body(self, request: SampleRequest) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk(self, event: dict[str, Any]) -> Chunk: ...


class GenerateStreamEndpoint(_HttpEndpoint):
    """Triton's extension of KServe's protocol."""

    def _path(self, model: str) -> str:
        return f"/v2/models/{model}/generate_stream"

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        name = "text_input" if isinstance(request.prompt, str) else "input_ids"
        return {
            name: request.prompt, "stream": True, "return_num_input_tokens": True, "return_num_output_tokens": True,
            "sampling_parameters": json.dumps({**self._sampling, "max_tokens": request.max_tokens}),
        }  # fmt: skip

    def _chunk(self, event: dict[str, Any]) -> Chunk:
        num_tokens = event.get("num_output_tokens", 0)
        return Chunk(num_tokens if isinstance(num_tokens, int) else sum(num_tokens), event.get("num_input_tokens"))


class OpenAIEndpoint(_HttpEndpoint):
    """`/v1/completions`."""

    def _path(self, model: str) -> str:
        return "/v1/completions"

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        return {**self._prompt(request), **self._sampling, "model": self._model, "max_tokens": request.max_tokens,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip

    def _prompt(self, request: SampleRequest) -> dict[str, Any]:
        return {"prompt": request.prompt}

    def _chunk(self, event: dict[str, Any]) -> Chunk:
        usage = event.get("usage") or {}
        has_text = any(self._text(choice) for choice in event.get("choices") or ())
        return Chunk(int(has_text), usage.get("prompt_tokens"), usage.get("completion_tokens"))

    def _text(self, choice: dict[str, Any]) -> Any:
        return choice.get("text")


class OpenAIChatEndpoint(OpenAIEndpoint):
    """`/v1/chat/completions`; a prompt is the one message of a conversation: text, images and videos after it."""

    def _path(self, model: str) -> str:
        return "/v1/chat/completions"

    def _prompt(self, request: SampleRequest) -> dict[str, Any]:
        content: Any = request.prompt
        if request.images:
            content = [{"type": "text", "text": request.prompt}, *map(_media_part, request.images)]
        return {"messages": [{"role": "user", "content": content}]}

    def _text(self, choice: dict[str, Any]) -> Any:
        delta = choice.get("delta") or {}
        return (
            delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        )


def _media_part(media: bytes | Sequence[bytes]) -> dict[str, Any]:
    """A part of a content: an image, or a video of which these are the frames."""
    kind, files = ("image", [media]) if isinstance(media, bytes) else ("video", media)
    code = ",".join(base64.b64encode(file).decode() for file in files)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{kind}/jpeg;base64,{code}"}}


class OpenAIEmbeddingEndpoint(_HttpEndpoint):
    """`/v1/embeddings`; `sampling` holds the task's parameters. The answer is as small as it can be."""

    _is_json = True

    def _path(self, model: str) -> str:
        return "/v1/embeddings"

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        return {"encoding_format": "base64", **self._sampling, "model": self._model, "input": request.prompt}

    def _chunk(self, event: dict[str, Any]) -> Chunk:
        return Chunk(0, (event.get("usage") or {}).get("prompt_tokens"), is_vector=bool(event.get("data")))


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise EndpointError("error", f"an answer is not JSON: {data[:MOST_QUOTED]!r}") from None
    if not isinstance(event, dict):
        raise EndpointError("error", f"an answer is no JSON object: {data[:MOST_QUOTED]!r}")
    if event.get("error"):
        error = event["error"]
        status = error.get("code") if isinstance(error, dict) else None
        kind = kind_of_status(status) if isinstance(status, int) else "error"
        raise EndpointError(kind, _text_of(error))
    return event


def _message(content: str, status: int) -> str:
    """What an answer with an error says."""
    try:
        return _text_of(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}: {content[:MOST_QUOTED].strip()}"


def _text_of(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
