"""Clients for the integration tests: gRPC streams by tritonclient, HTTP by the standard library, /metrics."""

import asyncio
import json
import queue
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
from quire_backend.model_config import INPUTS, TYPED_INPUTS
from support.serving import Server
from tritonclient import grpc as grpc_client
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult, service_pb2, service_pb2_grpc
from tritonclient.grpc import aio as grpc_aio
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

__all__ = [
    "Answer", "Sample", "ask", "ask_all", "cancel_at_the_end", "final_flags", "http", "infer_inputs", "metric", "run",
    "scrape", "snapshot", "sse", "unread_streams", "with_client",
]  # fmt: skip

MODEL = "tinypy"
DEADLINE_SECONDS = 120.0

_T = TypeVar("_T")
_NUMPY = {"TYPE_STRING": np.object_, "TYPE_BOOL": np.bool_, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64,
          "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64}  # fmt: skip
_DATATYPES = {"TYPE_STRING": "BYTES"}
_TYPES = {spec.name: spec.data_type for spec in (*INPUTS, *TYPED_INPUTS)}
_EVERY_MODELS = {spec.name for spec in INPUTS}


@dataclass
class Answer:
    """Everything that came for one request."""

    responses: list[dict[str, list[Any]]] = field(default_factory=list)
    error: InferenceServerException | None = None
    num_final_flags: int = 0
    """Responses that carried the FINAL flag."""

    @property
    def text(self) -> str:
        """All text, joined."""
        assert self.error is None, self.error
        return "".join(text for response in self.responses for text in response["text_output"])

    @property
    def token_ids(self) -> list[int]:
        """All token ids; the request must have asked for them."""
        assert self.error is None, self.error
        return [token_id for response in self.responses for token_id in response["token_ids"]]

    @property
    def message(self) -> str:
        """The error's text; there must be one."""
        assert self.error is not None, self.responses
        return str(self.error.message())


def infer_inputs(**values: Any) -> list[InferInput]:
    """Input tensors of the types that a model declares; a dict becomes JSON."""
    inputs = []
    for name, value in values.items():
        kind = _TYPES[name]
        value = json.dumps(value) if isinstance(value, dict) else value
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        array = np.array(items, dtype=_NUMPY[kind])
        tensor = InferInput(name, list(array.shape), _DATATYPES.get(kind, kind.removeprefix("TYPE_")))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


async def ask(
    client: grpc_aio.InferenceServerClient, *, model: str = MODEL, request_id: str = "",
    parameters: dict[str, Any] | None = None, outputs: list[str] | None = None,
    timeout: int | None = None, typed: bool = False,
    on_response: Callable[[dict[str, list[Any]]], None] = lambda response: None, **inputs: Any,
) -> Answer:  # fmt: skip
    """One request on a gRPC stream of its own.

    What is no input of every model is sent as a request parameter, as text; with `typed`, as an input all the same.
    """
    tensors, texts = _wire_form(inputs, typed)
    parameters = {**texts, **(parameters or {})} or None

    async def requests() -> Any:
        wanted = [InferRequestedOutput(name) for name in outputs] if outputs else None
        yield {
            "model_name": model, "inputs": infer_inputs(**tensors), "outputs": wanted, "request_id": request_id,
            "parameters": parameters, "timeout": timeout,
        }  # fmt: skip

    answer = Answer()
    try:
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                answer.error = error
                continue
            answer.num_final_flags += result.get_response().parameters["triton_final_response"].bool_param
            response = {}
            for output in result.get_response().outputs:
                items = result.as_numpy(output.name).tolist()
                response[output.name] = [item.decode() if isinstance(item, bytes) else item for item in items]
            answer.responses.append(response)
            on_response(response)
    except InferenceServerException as error:
        answer.error = error
    except grpc.aio.AioRpcError as error:  # the server is gone
        answer.error = InferenceServerException(error.details() or "", status=str(error.code()))
    return answer


def _wire_form(values: dict[str, Any], typed: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """(inputs, request parameters as text)."""
    tensors = {name: value for name, value in values.items() if typed or name in _EVERY_MODELS}
    texts = {name: json.dumps(value) if isinstance(value, dict | bool) else str(value)
             for name, value in values.items() if name not in tensors}  # fmt: skip
    return tensors, texts


def final_flags(server: Server, **inputs: Any) -> list[tuple[bool, bool]]:
    """(is final, has outputs) of each response to a client that takes an empty one, too; the asyncio client cannot."""
    responses: queue.Queue[InferResult | InferenceServerException] = queue.Queue()
    tensors, texts = _wire_form(inputs, typed=False)
    flags: list[tuple[bool, bool]] = []
    with grpc_client.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: responses.put(error or result))
        client.async_stream_infer(MODEL, infer_inputs(**tensors), parameters=texts, enable_empty_final_response=True)
        while not flags or not flags[-1][0]:
            result = responses.get(timeout=DEADLINE_SECONDS)
            assert isinstance(result, InferResult), result
            response = result.get_response()
            flags.append((response.parameters["triton_final_response"].bool_param, bool(response.outputs)))
        client.stop_stream()
    assert responses.empty()
    return flags


async def with_client(server: Server, work: Callable[[grpc_aio.InferenceServerClient], Awaitable[_T]]) -> _T:
    """Run `work` with a client, and not for ever."""
    async with grpc_aio.InferenceServerClient(server.grpc) as client:
        return await asyncio.wait_for(work(client), DEADLINE_SECONDS)


def run(server: Server, **request: Any) -> Answer:
    """One request, from start to end."""
    return asyncio.run(with_client(server, lambda client: ask(client, **request)))


def ask_all(server: Server, requests: list[dict[str, Any]]) -> list[Answer]:
    """Many requests at once, each on a stream of its own."""

    async def work(client: grpc_aio.InferenceServerClient) -> list[Answer]:
        coroutines: list[Coroutine[Any, Any, Answer]] = [ask(client, **request) for request in requests]
        return list(await asyncio.gather(*coroutines))

    return asyncio.run(with_client(server, work))


def cancel_at_the_end(server: Server, times: int, model: str = MODEL) -> None:
    """So many requests, one after the other, each cancelled just as its stream ends.

    tritonserver 2.51 keeps about one in fifty of them for ever.
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(serialize_byte_tensor(np.array([b"x"], dtype=np.object_)).tobytes())
    request.parameters["max_tokens"].int64_param = 2

    def held_open(is_over: threading.Event) -> Iterator[Any]:
        """A stream whose client could send more, as tritonclient's."""
        yield request
        is_over.wait(DEADLINE_SECONDS)

    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(times):
            is_over = threading.Event()
            call = stub.ModelStreamInfer(held_open(is_over), timeout=DEADLINE_SECONDS)
            for response in call:
                if response.error_message or response.infer_response.parameters["triton_final_response"].bool_param:
                    break
            call.cancel()
            is_over.set()


def http(server: Server, path: str, body: dict[str, Any] | bytes | None = None) -> tuple[int, Any]:
    """(status, JSON or text) of a POST with `body`, or of a GET without."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(f"http://{server.http}{path}", data=data)
    if data is None and path.startswith("/v2/repository"):
        request.method = "POST"
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
            status, content = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read().decode()
    try:
        return status, json.loads(content)
    except ValueError:
        return status, content


def sse(server: Server, body: dict[str, Any], model: str = MODEL) -> list[dict[str, Any]]:
    """The events of `generate_stream`."""
    status, content = http(server, f"/v2/models/{model}/generate_stream", body)
    assert status == 200, content
    return [json.loads(line.removeprefix("data: ")) for line in content.splitlines() if line]


def snapshot(server: Server, model: str, token: str, introspect: str = "snapshot") -> dict[str, Any]:
    """What the model says of itself, if the token is its token for introspection."""
    body = {"parameters": {"introspect": introspect, "introspection_token": token}}
    status, answer = http(server, f"/v2/models/{model}/generate", body)
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer["text_output"])
    return found


@contextmanager
def unread_streams(server: Server, model: str, count: int) -> Iterator[None]:
    """So many HTTP streams that ask for much and that nobody reads."""
    host, _, port = server.http.rpartition(":")
    wanted = {"text_input": "x", "logprobs": 20, "return_logprobs": True, "max_tokens": 900, "ignore_eos": True}
    body = json.dumps({**wanted, "stream": True}).encode()
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head.encode() + body)
        yield


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


def scrape(server: Server, name: str = "") -> list[Sample]:
    """All of /metrics as it is now, or the series of one name."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=DEADLINE_SECONDS) as response:
        lines = response.read().decode().splitlines()
    start = name and f"{name}{{"
    matches = (re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line) for line in lines if line.startswith(start))
    return [
        Sample(match[1], dict(re.findall(r'(\w+)="(.*?)"', match[2])), float(match[3])) for match in matches if match
    ]


def metric(server: Server, name: str, model: str = MODEL, **labels: str) -> float:
    """One series of /metrics as it is now."""
    wanted = {"model": model, "version": "1", "engine": "0", **labels}
    for sample in scrape(server, name):
        if sample.labels == wanted:
            return sample.value
    raise AssertionError(f"{name}{wanted} is not in /metrics")
