"""`quire scale`: more or fewer replicas of a model, on a server that runs. The model does it; this asks it to."""

import asyncio
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from quire_engine.system.extras import missing_package

from quire_cli.console import Console, waiting_line
from quire_cli.dashboard import INTROSPECTION_TOKEN
from quire_cli.errors import CommandError

_NEEDS = ("tritonclient", "grpc")
_TICK_S = 0.2
_METADATA = (("triton_grpc_error", "true"),)
"""Has the server end the stream with the error's status, and not with its text alone."""
_AWAY = re.compile(r"failed to connect|Connection (reset|refused)|Socket closed|DNS|Broken pipe")
"""In what gRPC says when there is no server, and no server says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleOptions:
    """Of what, on which server, there are to be how many."""

    model: str
    num_replicas: int
    url: str = "127.0.0.1:8001"
    """Of the server's gRPC."""

    @property
    def token(self) -> str:
        """The model's `introspection_token`; empty: none is known."""
        return os.environ.get(INTROSPECTION_TOKEN, "")


def scale(options: ScaleOptions) -> None:
    """Have the model change the number of its replicas, and wait until it has. Says on stdout what has become of it.

    Of a model with replicas on several hosts, they are those of the server's own host.

    Raises:
        CommandError: the server is away, the model has refused, and then its replicas are as they were, or Ctrl-C.
    """
    missing = missing_package("server", *_NEEDS)
    if missing:
        raise CommandError(missing)
    try:
        answer = asyncio.run(_ask(options))
    except KeyboardInterrupt:
        raise CommandError("interrupted; what the model has begun, it brings to its end") from None
    try:
        present, before = int(answer["replicas"]), int(answer["before"])
        others = None if answer.get("of_other_hosts") is None else int(answer["of_other_hosts"])
    except (KeyError, TypeError, ValueError):
        raise CommandError(
            f"{options.model} did not say how many replicas it has now; is it a model of Quire, of this version?"
        ) from None
    count = f"{present} {'replica' if present == 1 else 'replicas'}" + (
        " on its own host" if others is not None else ""
    )
    text = f"quire: {options.model} has {count}" + (" already" if present == before else f", and had {before}")
    if others is not None:
        text += f"; {others or 'none'} of other hosts {'is' if others < 2 else 'are'} up"
    print(text)


async def _ask(options: ScaleOptions) -> dict[str, Any]:
    """The model's answer, for which it takes as long as new replicas take to start."""
    asking = asyncio.create_task(_exchange(options))
    with waiting_line(Console(), f"{options.model}: {options.num_replicas} replicas are wanted") as waiting:
        while not asking.done():
            waiting.tick()
            await asyncio.wait([asking], timeout=_TICK_S)
    return await asking


async def _exchange(options: ScaleOptions) -> dict[str, Any]:
    import grpc
    from quire_backend.openai.triton_messages import texts_of
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name=options.model)
    request.parameters["introspect"].string_param = "scale"
    request.parameters["replicas"].int64_param = options.num_replicas
    if options.token:
        request.parameters["introspection_token"].string_param = options.token
    texts: list[str] = []
    async with grpc.aio.insecure_channel(options.url, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            async for response in stub.ModelStreamInfer(iter([request]), metadata=_METADATA):
                if response.error_message:
                    raise _refusal(options, response.error_message)
                texts += texts_of(response.infer_response)
        except grpc.aio.AioRpcError as error:
            text = " ".join((error.details() or error.code().name).split())
            if error.code() is grpc.StatusCode.UNAVAILABLE and _AWAY.search(text):
                raise CommandError(
                    f"the server at {options.url} does not answer: {text}; name its gRPC port with --url HOST:PORT"
                ) from None
            raise _refusal(options, text) from None
    try:
        answer = json.loads("".join(texts))
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _refusal(options: ScaleOptions, text: str) -> CommandError:
    hint = ""
    if not options.token and "introspection_token is missing" in text:
        hint = f"; set {INTROSPECTION_TOKEN} to it; where quire serve has made one up, start that with one of yours"
    return CommandError(f"{options.model}: {text}{hint}")
