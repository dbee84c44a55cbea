"""A request as another client would send it: by curl, or from Python."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

Prompt = str | list[dict[str, Any]]
"""Text, or a conversation."""

_PYTHON = """\
{imports}from quire_client import Client

with Client({url}) as client:
    for chunk in client.stream({model}, {prompt}, {options}):
        print(chunk.text, end="", flush=True)
"""


def curl(
    http: str,
    model: str,
    prompt: Prompt,
    sampling: Mapping[str, Any],
    parameters: Mapping[str, Any],
    parameters_input: str = "sampling_parameters",
    image_names: Sequence[str] = (),
) -> str:
    """A command that sends the request, and gets the whole answer at once.

    Args:
        http: HOST:PORT of the server's HTTP.
        model: its name.
        prompt: of the request.
        sampling: parameters of any type, as vLLM names them.
        parameters: the request's other ones.
        parameters_input: the input that `sampling` goes into.
        image_names: files in the folder where the command runs.
    """
    inputs = {"text_input": prompt} if isinstance(prompt, str) else {"messages": json.dumps(prompt)}
    body: dict[str, Any] = {**inputs, parameters_input: json.dumps(sampling)}
    if parameters:
        body["parameters"] = parameters
    address = f"http://{http}/v2/models/{model}/generate"
    text = json.dumps(body, ensure_ascii=False)
    if not image_names:
        return f"curl -s {shlex.quote(address)} -d {shlex.quote(text)}"
    # Through a pipe, as an argument of a command holds 128 KiB; curl takes line ends out.
    parts = [text.removesuffix("}") + ', "image": ["', *['", "'] * (len(image_names) - 1), '"]}']
    commands = [f"printf %s {shlex.quote(parts[0])}"]
    for name, part in zip(image_names, parts[1:], strict=True):
        commands += [f"base64 < {shlex.quote(name)}", f"printf %s {shlex.quote(part)}"]
    return f"({'; '.join(commands)}) | curl -s {shlex.quote(address)} -d @-"


def python(
    url: str,
    model: str,
    prompt: Prompt,
    sampling: Mapping[str, Any],
    parameters: Mapping[str, Any],
    image_names: Sequence[str] = (),
) -> str:
    """A program that sends the request over gRPC, and prints the answer as it comes.

    Args:
        url: HOST:PORT of the server's gRPC.
        model: its name.
        prompt: of the request.
        sampling: parameters of any type, as vLLM names them.
        parameters: the request's other ones.
        image_names: files in the folder where the program runs.
    """
    options = [f"**{dict(sampling)!r}", *([f"parameters={dict(parameters)!r}"] if parameters else [])]
    if image_names:
        options.insert(0, f"images=[Path(name).read_bytes() for name in {list(image_names)!r}]")
    imports = "from pathlib import Path\n\n" if image_names else ""
    return _PYTHON.format(
        imports=imports, url=repr(url), model=repr(model), prompt=repr(prompt), options=", ".join(options)
    )
