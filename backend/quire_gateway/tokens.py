"""/tokenize and /detokenize, in vLLM's shapes. A field that is wrong, or that the model rejects, is an ApiError."""

from collections.abc import Mapping
from typing import Any

from quire_gateway.chat import take_conversation
from quire_gateway.errors import InvalidRequestError, of_model
from quire_gateway.fields import Fields
from quire_gateway.media import Media
from quire_gateway.requests import GenerationRequest, is_token_id, take_model
from quire_gateway.triton_client import ModelError, TritonClient
from quire_gateway.triton_messages import Prompt

_RENAMED = {"text_input": "prompt", "prompt_token_ids": "tokens", "input_ids": "tokens"}


async def tokenize(client: TritonClient, fields: Fields, num_bytes: int, media: Media) -> dict[str, Any]:
    """The answer to /tokenize: of a `prompt`, or of the `messages` of a chat."""
    model = take_model(fields)
    wants_strings = fields.flag("return_token_strs")
    prompt: Prompt | None = fields.take("prompt")
    options: dict[str, bool] = {}
    if isinstance(prompt, str):
        options["add_special_tokens"] = fields.flag("add_special_tokens", True)
    elif prompt is None and "messages" in fields.rest():
        prompt = take_conversation(fields)
    else:
        raise InvalidRequestError("prompt", "prompt must be a string; or give messages instead")
    fields.check_all_taken()
    if isinstance(prompt, Mapping):
        prompt = await media.fetch(prompt, "messages")
    answer = await _run(client, fields, model, "tokenize", prompt, options, num_bytes)
    return {
        "count": len(answer["tokens"]),
        "max_model_len": answer["max_model_len"],
        "tokens": answer["tokens"],
        "token_strs": answer["token_strs"] if wants_strings else None,
    }


async def detokenize(client: TritonClient, fields: Fields, num_bytes: int) -> dict[str, Any]:
    """The answer to /detokenize."""
    model = take_model(fields)
    tokens = fields.take("tokens")
    if not isinstance(tokens, list) or not tokens or not all(map(is_token_id, tokens)):
        raise InvalidRequestError("tokens", "tokens must be a list of one or more token ids")
    fields.check_all_taken()
    answer = await _run(client, fields, model, "detokenize", tokens, {}, num_bytes)
    return {"prompt": answer["prompt"]}


async def count_tokens(client: TritonClient, request: GenerationRequest, num_bytes: int) -> int:
    """How many tokens the prompt of a request has."""
    try:
        answer = await client.run_task(request.model, "tokenize", request.prompts[0], num_bytes)
    except ModelError as error:
        raise of_model(error.status, str(error), request.said, request.renamed) from None
    return len(answer["tokens"])


async def text_of(client: TritonClient, model: str, token_ids: list[int]) -> str:
    """The text of tokens, special ones included."""
    text: str = (await _run(client, Fields({}), model, "detokenize", token_ids, {}, 4 * len(token_ids)))["prompt"]
    return text


async def _run(
    client: TritonClient, fields: Fields, model: str, task: str, prompt: Prompt, options: dict[str, bool],
    num_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    try:
        return await client.run_task(model, task, prompt, num_bytes, **options)
    except ModelError as error:
        raise of_model(error.status, str(error), fields.said, _RENAMED) from None
