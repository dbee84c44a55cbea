"""What an operator changes, in vLLM's shapes: /sleep, /wake_up, /is_sleeping, /reset_prefix_cache, /update_weights,
/v1/load_lora_adapter and /v1/unload_lora_adapter.

They need the model's `introspection_token`, as `Authorization: Bearer TOKEN`, and no API key besides; but for
/is_sleeping, which needs what other requests need. The model itself checks the token and all values.
"""

from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quire_gateway.errors import ApiError, InvalidRequestError, of_model
from quire_gateway.fields import Fields
from quire_gateway.triton_client import ModelError, TritonClient, client_of
from quire_gateway.work import unless_client_leaves

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
        said = await client_of(request).ask(model, "health")
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


async def load_lora_adapter(request: Request, fields: Fields) -> Response:
    """Load an adapter from a folder of the server.

    Raises:
        ApiError: the token is wrong, or a field is; or the model rejects it.
    """
    name, path = fields.take("lora_name"), fields.take("lora_path")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise InvalidRequestError("lora_name", "Both 'lora_name' and 'lora_path' must be provided.")
    in_place = fields.flag("load_inplace")
    fields.take("is_3d_lora_weight")  # the tensors' shapes say it
    client = client_of(request)
    model = await _model_with_adapters(client, fields)
    await _change_adapter(request, fields, model, "loras")  # what follows is for those with the token
    cards = await client.cards()
    taken = next((other for other, card in cards.items() if name in card.get("loras", ()) and other != model), None)
    if name in cards or taken is not None:
        what = "a served model" if taken is None else f"an adapter of {taken}"
        raise InvalidRequestError("lora_name", f"lora_name is {name[:200]!r}, which is {what}; choose another")
    await _change_adapter(
        request, fields, model, "load_lora", {"lora_name": name, "lora_path": path, "load_inplace": in_place}
    )
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: Request, fields: Fields) -> Response:
    """Unload an adapter.

    Raises:
        ApiError: the token is wrong, or a field is; or there is no such adapter.
    """
    name = fields.take("lora_name")
    if not (isinstance(name, str) and name):
        raise InvalidRequestError("lora_name", "'lora_name' needs to be provided to unload a LoRA adapter.")
    fields.take("lora_int_id")
    client = client_of(request)
    model, adapter = (name, None) if "model" in fields.rest() else await client.find(name)
    if adapter is None:
        model = await _model_with_adapters(client, fields)  # which then says that it has none
    await _change_adapter(request, fields, model, "unload_lora", {"lora_name": name})
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


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
        work = client_of(request).operate(model, operation, arguments, token)
        return await unless_client_leaves(request.receive, work)
    except ModelError as error:
        message = str(error)
        if "introspection_token" not in message:
            raise of_model(error.status, message, said, {}) from None
        hint = "" if token else ": send it as Authorization: Bearer TOKEN"
        raise ApiError(401 if message.startswith("unauthorized") else 403, f"{message}{hint}") from None


async def _only_model(request: Request) -> str:
    names = await client_of(request).models()
    if len(names) != 1:
        raise InvalidRequestError("model", f"model is missing, and there are {len(names)}; name one")
    return names[0]


async def _model_with_adapters(client: TritonClient, fields: Fields) -> str:
    """The served model that an adapter is for: the one that the body names, or the only one that takes adapters."""
    model, cards = fields.take("model"), await client.cards()
    taking = [name for name, card in cards.items() if "loras" in card] or list(cards)
    if model is None and len(taking) == 1:
        return taking[0]
    if not isinstance(model, str) or model not in cards:
        shown = "missing, and several models take adapters" if model is None else repr(model)[:200]
        wanted = "the served model that the adapter is for, by its name in /v1/models"
        raise InvalidRequestError("model", f"model is {shown}; it must be {wanted}")
    return model


async def _change_adapter(
    request: Request, fields: Fields, model: str, action: str, parameters: Mapping[str, Any] | None = None
) -> None:
    fields.check_all_taken()
    await run_operation(request, model, action, parameters or {}, fields.said)
