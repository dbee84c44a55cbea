"""/v1/models, /version and the probes: what the gateway says of the models and of itself."""

import asyncio
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_gateway.errors import RETRY_AFTER_S, UNAVAILABLE, ApiError, ModelNotFoundError, UnavailableError
from quire_gateway.triton_client import TritonClient


async def list_models(request: Request) -> Response:
    """All models that are ready."""
    names = await _client(request).models()
    cards = await asyncio.gather(*(_card(request, name) for name in names))
    return JSONResponse({"object": "list", "data": cards})


async def show_model(request: Request) -> Response:
    """One of them.

    Raises:
        ModelNotFoundError: there is none of that name.
    """
    model = request.path_params["model"]
    if model not in await _client(request).models():
        raise ModelNotFoundError(model)
    return JSONResponse(await _card(request, model))


async def show_version(request: Request) -> Response:
    """Of the gateway's package."""
    try:
        number = version("quire")
    except PackageNotFoundError:  # run from a folder of sources
        number = "unknown"
    return JSONResponse({"version": number})


async def health(request: Request) -> Response:
    """200 while the server answers, has models, and the engine of each runs."""
    client = _client(request)
    try:
        names = await client.models()
        healthy = bool(names) and all(await asyncio.gather(*(client.is_healthy(name) for name in names)))
    except UnavailableError:
        healthy = False
    if healthy:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable"}, UNAVAILABLE, {"retry-after": str(RETRY_AFTER_S)})


async def _card(request: Request, name: str) -> dict[str, Any]:
    """What is said of a model, in vLLM's shape. The server does not tell when it was made: it is as old as this gateway
    has known it.
    """
    first_seen: dict[str, int] = request.app.state.first_seen
    created = first_seen.setdefault(name, int(time.time()))
    said: dict[str, Any] = {}
    with suppress(ApiError):  # its engine is being started
        said = await _client(request).ask(name, "chat_format")
    return {
        "id": name, "object": "model", "created": created, "owned_by": "quire", "root": name, "parent": None,
        "max_model_len": said.get("max_model_len"), **({"tasks": said["tasks"]} if "tasks" in said else {}),
    }  # fmt: skip


def _client(request: Request) -> TritonClient:
    client: TritonClient = request.app.state.client
    return client
