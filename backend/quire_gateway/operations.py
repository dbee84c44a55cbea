"""What an operator switches: /sleep, /wake_up, /is_sleeping, /reset_prefix_cache and /update_weights, in vLLM's shapes.

They need the model's `introspection_token`, as `Authorization: Bearer TOKEN`, and no API key besides; but for
/is_sleeping, which needs what other requests need. The model itself checks the token and all values.
"""

from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_gateway.disconnect import unless_client_leaves
from quire_gateway.errors import ApiError, InvalidRequestError, of_model
from quire_gateway.fields import Fields
from quire_gateway.triton_client import ModelError, TritonClient

ROUTES = (
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
"""They are for operators."""
MAX_BODY_BYTES = 1 << 16
"""Of a request to one of them, which needs no API key to be read."""
_PARAMETERS = {"sleep": ("level", "mode"), "wake_up": (), "reset_prefix_cache": (), "is_sleeping": ()}
"""The parameters of the query by operation, besides `model`."""


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
    return JSONResponse(await run_operation(request, model, operation, arguments, arguments))


async def update_weights(request: Request, fields: Fields) -> Response:
    """The operation that has a body: `weights_path`, and `model`."""
    model = str(fields.take("model") or "") or await _only_model(request)
    path = fields.take("weights_path")
    for name in fields.rest():
        raise InvalidRequestError(name, f"{name[:100]} is no field of update_weights; it takes model, weights_path")
    if not isinstance(path, str):
        raise InvalidRequestError("weights_path", "weights_path must be the absolute path of a folder of the server")
    arguments = {"weights_path": path}
    return JSONResponse(await run_operation(request, model, "update_weights", arguments, arguments))


async def run_operation(
    request: Request, model: str, operation: str, arguments: Mapping[str, Any], said: Collection[str]
) -> Any:
    """What a model answers.

    Args:
        request: has the token.
        model: a served one.
        operation: as of `introspect`.
        arguments: of the operation.
        said: names of what the client has given.

    Raises:
        ApiError: the token is wrong; or the model has rejected it, or could not do it.
        ClientLeftError: which cancels nothing: what the model has begun, it brings to its end.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else ""
    try:
        work = _client(request).operate(model, operation, arguments, token)
        return await unless_client_leaves(request.receive, work)
    except ModelError as error:
        message = str(error)
        if "introspection_token" not in message:
            raise of_model(error.status, message, said, {}) from None
        hint = "" if token else ": send it as Authorization: Bearer TOKEN"
        raise ApiError(401 if message.startswith("unauthorized") else 403, f"{message}{hint}") from None


async def _only_model(request: Request) -> str:
    names = await _client(request).models()
    if len(names) != 1:
        raise InvalidRequestError("model", f"model is missing, and there are {len(names)}; name one")
    return names[0]


def _client(request: Request) -> TritonClient:
    client: TritonClient = request.app.state.client
    return client
