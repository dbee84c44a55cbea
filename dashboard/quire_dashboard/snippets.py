"""A request as another client would send it: by curl, or from Python."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

Prompt = str | list[dict[str, str]]
"""Text, or a conversation."""

_PYTHON = """\
from quire_client import Client

with Client({url}) as client:
    for chunk in client.stream({model}, {prompt}, {options}):
        print(chunk.text, end="", flush=True)
"""


def curl(
    http: str,
    model: str,
    prompt: str | list[dict[str, str]],
    sampling: Mapping[str, Any],
    parameters: Mapping[str, Any],
    parameters_input: str = "sampling_parameters",
) -> str:
    """A command that sends the request, and gets the whole answer at once.

    Args:
        http: HOST:PORT of the server's HTTP.
        model: its name.
        prompt: of the request.
        sampling: parameters of any type, as vLLM names them.
        parameters: the request's other ones.
        parameters_input: the input that `sampling` goes into.
    """
    inputs = {"text_input": prompt} if isinstance(prompt, str) else {"messages": json.dumps(prompt)}
    body: dict[str, Any] = {**inputs, parameters_input: json.dumps(sampling)}
    if parameters:
        body["parameters"] = parameters
    address = f"http://{http}/v2/models/{model}/generate"
    return f"curl -s {shlex.quote(address)} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"


def python(url: str, model: str, prompt: Prompt, sampling: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """A program that sends the request over gRPC, and prints the answer as it comes.

    Args:
        url: HOST:PORT of the server's gRPC.
        model: its name.
        prompt: of the request.
        sampling: parameters of any type, as vLLM names them.
        parameters: the request's other ones.
    """
    options = [f"**{dict(sampling)!r}", *([f"parameters={dict(parameters)!r}"] if parameters else [])]
    return _PYTHON.format(url=repr(url), model=repr(model), prompt=repr(prompt), options=", ".join(options))
