"""What an operator switches: /sleep, /wake_up, /is_sleeping, /reset_prefix_cache and /update_weights, in vLLM's shapes.

The model itself checks the token and all values; here they are only handed on. A page of another site can send none of
it, as the token has a header of its own.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_gateway.disconnect import unless_client_leaves
from quire_gateway.errors import ApiError, InvalidRequestError, UnavailableError
from quire_gateway.fields import Fields
from quire_gateway.triton_client import ModelError, TritonClient

TOKEN_HEADER = "x-introspection-token"
_PARAMETERS = {"sleep": ("level", "mode"), "wake_up": (), "reset_prefix_cache": (), "is_sleeping": ()}
"""Of the query, by operation, besides `model`."""
_UNAVAILABLE, _BAD_REQUEST, _UNAUTHORIZED = 503, 400, 401


async def operate(request: Request) -> Response:
    """One of the operations without a body, by the path's name. The answer comes once it is so."""
    operation, values = request.url.path.removeprefix("/"), dict(request.query_params)
    model = values.pop("model", "") or await _only_model(request)
    for name in values:
        if name not in _PARAMETERS[operation]:
            known = ", ".join(("model", *_PARAMETERS[operation]))
            raise InvalidRequestError(name, f"{name[:100]} is no parameter of {operation}; it takes {known}")
    if operation == "is_sleeping":
        said = await _client(request).ask(model, "health")
        return JSONResponse({"is_sleeping": said.get("is_sleeping") is True})
    level = values.get("level", "")
    arguments = values | ({"level": int(level)} if level.isdecimal() and len(level) < 10 else {})
    return await _answer(request, model, operation, arguments)


async def update_weights(request: Request, fields: Fields) -> Response:
    """The operation that has a body: `weights_path`, and `model`."""
    model = str(fields.take("model") or "") or await _only_model(request)
    path = fields.take("weights_path")
    for name in fields.rest():
        raise InvalidRequestError(name, f"{name[:100]} is no field of update_weights; it takes model, weights_path")
    if not isinstance(path, str):
        raise InvalidRequestError("weights_path", "weights_path must be the absolute path of a folder of the server")
    return await _answer(request, model, "update_weights", {"weights_path": path})


async def _answer(request: Request, model: str, operation: str, arguments: dict[str, Any]) -> Response:
    token = request.headers.get(TOKEN_HEADER, "")
    parameters = {**arguments, **({"introspection_token": token} if token else {})}
    work = _client(request).ask(model, operation, parameters)
    try:
        return JSONResponse(await unless_client_leaves(request.receive, work))
    except ModelError as error:
        message = str(error)
        if message.startswith("unauthorized"):
            raise ApiError(_UNAUTHORIZED, f"{message}; the header {TOKEN_HEADER} has it", param=TOKEN_HEADER) from None
        if error.status == _UNAVAILABLE:
            raise UnavailableError(message) from None
        name = message.split(" ", 1)[0]
        raise ApiError(error.status, message, param=name if name in arguments else None) from None


async def _only_model(request: Request) -> str:
    names = await _client(request).models()
    if len(names) != 1:
        raise InvalidRequestError("model", f"model is missing, and there are {len(names)}; name one")
    return names[0]


def _client(request: Request) -> TritonClient:
    client: TritonClient = request.app.state.client
    return client
