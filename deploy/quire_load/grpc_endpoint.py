"""A model behind Triton's gRPC: each request is a stream of its own."""

import json
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from quire_load.datasets import SampleRequest
from quire_load.endpoint import Chunk, EndpointError
from quire_load.triton_messages import infer_request, outputs_of

NUM_CHANNELS = 4
"""Connections: a process's streams share their windows and their thread in the server."""
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
]
_METADATA = (("triton_grpc_error", "true"),)
"""Has the server end a stream that failed with the error's status, and not with its text alone."""
_TRANSPORT = re.compile(r"failed to connect|Socket closed|Connection (reset|refused)|ipv[46]:|DNS|GOAWAY|Broken pipe")
"""In what gRPC itself says; the server's own UNAVAILABLE means a full queue."""
_KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.NOT_FOUND: "invalid",
    grpc.StatusCode.UNAVAILABLE: "rejected",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
}


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
        self._channels = [grpc.aio.insecure_channel(url, options=_OPTIONS) for _ in range(NUM_CHANNELS)]
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
        inputs: dict[str, str | bool | list[int]] = {
            "text_input" if isinstance(request.prompt, str) else "input_ids": request.prompt,
            "sampling_parameters": json.dumps(sampling), "stream": True, "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }  # fmt: skip
        stub = self._stubs[self._num_sent % NUM_CHANNELS]
        self._num_sent += 1
        call = stub.ModelStreamInfer(iter([infer_request(self._model, inputs)]), metadata=_METADATA)
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
    message = error.details() or error.code().name
    kind = _KINDS.get(error.code(), "error")
    return EndpointError("disconnected" if kind == "rejected" and _TRANSPORT.search(message) else kind, message)
