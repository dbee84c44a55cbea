"""/v1/models, /version and the probes: what the gateway says of the models and of itself."""

import asyncio
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_gateway.errors import RETRY_AFTER_S, UNAVAILABLE, ModelNotFoundError, UnavailableError
from quire_gateway.triton_client import client_of


async def list_models(request: Request) -> Response:
    """All models that are ready, and their adapters."""
    return JSONResponse({"object": "list", "data": await _cards(request)})


async def show_model(request: Request) -> Response:
    """One of them.

    Raises:
        ModelNotFoundError: there is none of that name.
    """
    model = request.path_params["model"]
    for card in await _cards(request):
        if card["id"] == model:
            return JSONResponse(card)
    raise ModelNotFoundError(model)


async def show_version(request: Request) -> Response:
    """Of the gateway's package."""
    try:
        number = version("quire")
    except PackageNotFoundError:  # run from a folder of sources
        number = "unknown"
    return JSONResponse({"version": number})


async def health(request: Request) -> Response:
    """200 while the server answers, has models, and the engine of each runs."""
    client = client_of(request)
    try:
        names = await client.models()
        healthy = bool(names) and all(await asyncio.gather(*(client.is_healthy(name) for name in names)))
    except UnavailableError:
        healthy = False
    if healthy:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable"}, UNAVAILABLE, {"retry-after": str(RETRY_AFTER_S)})


async def _cards(request: Request) -> list[dict[str, Any]]:
    """What is said of the models, in vLLM's shape. The server does not tell when one was made: it is as old as this
    gateway has known it. An adapter's `root` is its model and not its folder, which only operators may see.
    """
    first_seen: dict[str, int] = request.app.state.first_seen
    served = await client_of(request).cards()

    def card(name: str, model: str, said: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": first_seen.setdefault(name, int(time.time())),
            "owned_by": "quire", "root": model, "parent": None if name == model else model,
            "max_model_len": said.get("max_model_len"), **({"tasks": said["tasks"]} if "tasks" in said else {}),
        }  # fmt: skip

    return [
        card(name, model, said)
        for model, said in served.items()
        for name in (model, *(adapter for adapter in said.get("loras", ()) if adapter not in served))
    ]
