"""A model behind Triton's gRPC: each request is a stream of its own."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from quire_client import ClientError, DeadlineExceeded, Disconnected, InvalidArgument, NotFound, Unavailable
from quire_client.messages import generation_request, outputs_of
from quire_client.pooling import pooled_of, pooling_request
from quire_client.streams import MANY_STREAMS, Connection

from quire_load.datasets import SampleRequest
from quire_load.endpoint import Chunk, EndpointError

_KINDS: Mapping[type[ClientError], str] = {
    InvalidArgument: "invalid", NotFound: "invalid", Unavailable: "rejected", Disconnected: "disconnected",
    DeadlineExceeded: "timeout",
}  # fmt: skip
_FLAGS = ("stream", "return_num_input_tokens", "return_num_output_tokens")


class GrpcEndpoint:
    """An `Endpoint` of tritonserver's gRPC.

    Args:
        url: HOST:PORT.
        model: its name.
        sampling: further sampling parameters of every request.
    """

    def __init__(self, url: str, model: str, sampling: Mapping[str, Any]) -> None:
        self._model = model
        self._sampling = sampling
        self._connection = Connection(url, MANY_STREAMS)

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def generate(self, request: SampleRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one answer. Closing the iterator early cancels the request.

        Raises:
            EndpointError: it has failed.
        """
        try:
            async with aclosing(self._connection.responses(self._request(request))) as responses:
                async for response in responses:
                    chunk = self._chunk(response)
                    if chunk is not None:
                        yield chunk
        except ClientError as error:
            raise EndpointError(_KINDS.get(type(error), "error"), str(error)) from None

    def _request(self, request: SampleRequest) -> Any:
        sampling = {**self._sampling, "max_tokens": request.max_tokens, **request.names}
        return generation_request(self._model, request.prompt, sampling, _FLAGS)

    def _chunk(self, response: Any) -> Chunk | None:
        outputs = outputs_of(response)
        if not outputs:
            return None
        num_input_tokens = next(iter(outputs.get("num_input_tokens", ())), None)
        return Chunk(sum(outputs.get("num_output_tokens", ())), num_input_tokens)


class GrpcEmbeddingEndpoint(GrpcEndpoint):
    """The same of a model that embeds; `sampling` holds the task's parameters."""

    def _request(self, request: SampleRequest) -> Any:
        return pooling_request(self._model, "embed", request.prompt, None, {**self._sampling, **request.names})

    def _chunk(self, response: Any) -> Chunk | None:
        pooled = pooled_of(response)
        return None if pooled is None else Chunk(0, sum(pooled.num_prompt_tokens), is_vector=True)
