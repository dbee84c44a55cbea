"""A model behind Triton's gRPC: each request is a stream of its own."""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc
from quire_client import ClientError, DeadlineExceeded, Disconnected, InvalidArgument, NotFound, Unavailable
from quire_client.errors import error_of
from quire_client.messages import Value, infer_request, outputs_of
from quire_client.streams import METADATA, OPTIONS
from tritonclient.grpc import service_pb2_grpc

from quire_load.datasets import SampleRequest
from quire_load.endpoint import Chunk, EndpointError

NUM_CHANNELS = 4
"""Connections: a process's streams share their windows and their thread in the server."""
_KINDS: Mapping[type[ClientError], str] = {
    InvalidArgument: "invalid", NotFound: "invalid", Unavailable: "rejected", Disconnected: "disconnected",
    DeadlineExceeded: "timeout",
}  # fmt: skip


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
        self._channels = [grpc.aio.insecure_channel(url, options=OPTIONS) for _ in range(NUM_CHANNELS)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        self._num_sent = 0

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    async def generate(self, request: SampleRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one answer. Closing the iterator early cancels the request.

        Raises:
            EndpointError: it has failed.
        """
        sampling = {**self._sampling, "max_tokens": request.max_tokens}
        if request.slo_class:
            sampling["slo_class"] = request.slo_class
        inputs: dict[str, Value] = {
            "text_input" if isinstance(request.prompt, str) else "input_ids": request.prompt,
            "sampling_parameters": json.dumps(sampling), "stream": True, "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }  # fmt: skip
        stub = self._stubs[self._num_sent % NUM_CHANNELS]
        self._num_sent += 1
        call = stub.ModelStreamInfer(iter([infer_request(self._model, inputs)]), metadata=METADATA)
        refused, has_ended = "", False
        try:
            async for response in call:
                if response.error_message:
                    refused = response.error_message
                    continue
                outputs = outputs_of(response.infer_response)
                if outputs:
                    num_input_tokens = next(iter(outputs.get("num_input_tokens", ())), None)
                    yield Chunk(sum(outputs.get("num_output_tokens", ())), num_input_tokens)
            has_ended = True
        except grpc.aio.AioRpcError as error:
            has_ended = True
            raise _failure(error) from None
        finally:
            if not has_ended:
                call.cancel()
        if refused:
            raise EndpointError("error", refused)


def _failure(error: grpc.aio.AioRpcError) -> EndpointError:
    failure = error_of(error)
    return EndpointError(_KINDS.get(type(failure), "error"), str(failure))
