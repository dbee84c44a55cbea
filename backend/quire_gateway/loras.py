"""/v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's bodies and answers, for operators (`operations.py`)."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire_gateway.errors import InvalidRequestError
from quire_gateway.fields import Fields
from quire_gateway.operations import run_operation
from quire_gateway.triton_client import TritonClient


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
    client: TritonClient = request.app.state.client
    model = await _model(client, fields)
    await _operate(request, fields, model, "loras")  # what follows is for those with the token
    cards = await client.cards()
    taken = next((other for other, card in cards.items() if name in card.get("loras", ()) and other != model), None)
    if name in cards or taken is not None:
        what = "a served model" if taken is None else f"an adapter of {taken}"
        raise InvalidRequestError("lora_name", f"lora_name is {name[:200]!r}, which is {what}; choose another")
    await _operate(
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
    client: TritonClient = request.app.state.client
    model, adapter = (name, None) if "model" in fields.rest() else await client.find(name)
    if adapter is None:
        model = await _model(client, fields)  # which then says that it has none
    await _operate(request, fields, model, "unload_lora", {"lora_name": name})
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def _model(client: TritonClient, fields: Fields) -> str:
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


async def _operate(
    request: Request, fields: Fields, model: str, action: str, parameters: Mapping[str, Any] | None = None
) -> None:
    for name in fields.rest():
        raise InvalidRequestError(name, f"{name[:100]} is not a field of this route")
    await run_operation(request, model, action, parameters or {}, fields.said)
