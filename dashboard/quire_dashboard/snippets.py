"""A request as another client would send it: by curl, or from Python."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

_PYTHON = """\
import queue

import numpy as np
import tritonclient.grpc as grpcclient

inputs = []
for name, value in {{"{what}": {text}, "sampling_parameters": {sampling}}}.items():
    inputs.append(grpcclient.InferInput(name, [1], "BYTES"))
    inputs[-1].set_data_from_numpy(np.array([value.encode()], dtype=object))
inputs.append(grpcclient.InferInput("stream", [1], "BOOL"))
inputs[-1].set_data_from_numpy(np.array([True]))

responses: queue.Queue = queue.Queue()
with grpcclient.InferenceServerClient({url}) as client:
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer({model}, inputs, parameters={parameters}, enable_empty_final_response=True)
    while True:
        result, error = responses.get()
        if error:
            raise error
        text = result.as_numpy("text_output")
        if text is not None:
            print(text[0].decode(), end="", flush=True)
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
"""


def curl(
    http: str, model: str, inputs: Mapping[str, str], sampling: Mapping[str, Any], parameters: Mapping[str, Any]
) -> str:
    """A command that sends the request, and gets the whole answer at once.

    Args:
        http: HOST:PORT of the server's HTTP.
        model: its name.
        inputs: the prompt, as `text_input` or `messages`.
        sampling: parameters of any type, as vLLM names them.
        parameters: the request's other ones.
    """
    body: dict[str, Any] = {**inputs, "sampling_parameters": json.dumps(sampling)}
    if parameters:
        body["parameters"] = parameters
    address = f"http://{http}/v2/models/{model}/generate"
    return f"curl -s {shlex.quote(address)} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"


def python(
    url: str, model: str, inputs: Mapping[str, str], sampling: Mapping[str, Any], parameters: Mapping[str, Any]
) -> str:
    """A program that sends the request over gRPC, and prints the answer as it comes.

    Args:
        url: HOST:PORT of the server's gRPC.
        model: its name.
        inputs: the prompt, as `text_input` or `messages`.
        sampling: parameters of any type, as vLLM names them.
        parameters: the request's other ones.
    """
    ((what, text),) = inputs.items()
    return _PYTHON.format(
        what=what, text=repr(text), sampling=repr(json.dumps(sampling)), url=repr(url), model=repr(model),
        parameters=repr(dict(parameters)),
    )  # fmt: skip
