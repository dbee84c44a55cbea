"""/v1/embeddings, /rerank, /score, /classify and /pooling: a body in the shape of OpenAI, Cohere, Jina or vLLM as one
request for vectors, and the vectors as the body of the answer.

Only what the gateway itself needs is looked at here. Everything else, such as `dimensions`, goes to the model under the
name that the client gave it, and the model says what is wrong with it. What a model can do is the model's to say, too.
A field that is wrong is an InvalidRequestError.
"""

import base64
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from quire_client import Pooled
from quire_client.pooling import Texts

from quire_gateway.chat import take_conversation
from quire_gateway.errors import InvalidRequestError
from quire_gateway.fields import Fields
from quire_gateway.requests import MAX_PROMPTS, read_prompts, take_model

_IGNORED = ("user", "metadata", "service_tier")
"""Fields that change nothing in the answer."""
_ENCODINGS = ("float", "base64")
_BOTH = (("text_1", "text_2"), ("queries", "documents"))
"""Names of what is compared, older and newer ones of vLLM's."""

Render = Callable[[Pooled], dict[str, Any]]
"""Makes the body of an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingCall:
    """What one HTTP request asks of a model."""

    model: str
    task: str
    """Empty: the model's own."""
    texts: Texts
    pairs: list[str] | None = None
    parameters: Mapping[str, Any]
    """Parameters of the task, under the model's names."""
    said: frozenset[str]
    """All fields of the body."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The model's name of an input → the client's."""
    render: Render


def parse_embeddings(fields: Fields) -> PoolingCall:
    """The body of /v1/embeddings."""
    return _vectors(fields, "embed", "embd", "embedding", "embedding")


def parse_pooling(fields: Fields) -> PoolingCall:
    """The body of /pooling."""
    task = fields.take_as(str, "task", "a string") or ""
    if task == "score":
        raise InvalidRequestError("task", "task is score, which compares two texts; /score and /rerank take them")
    return _vectors(fields, task, "pool", "pooling", "data")


def parse_classify(fields: Fields) -> PoolingCall:
    """The body of /classify."""
    model, texts = take_model(fields), _take_input(fields)

    def render(pooled: Pooled) -> dict[str, Any]:
        def item(index: int, part: npt.NDArray[np.float32]) -> dict[str, Any]:
            best = int(part.argmax())
            label = pooled.labels[best] if pooled.labels else None
            return {"index": index, "label": label, "probs": part.tolist(), "num_classes": len(part)}

        return _list("classify", model, pooled, item)

    return _call(fields, model, "classify", texts, render)


def parse_score(fields: Fields) -> PoolingCall:
    """The body of /score."""
    model = take_model(fields)
    first, second = next((names for names in _BOTH if any(name in fields.rest() for name in names)), _BOTH[0])
    texts, pairs = _take_texts(fields, first), _take_texts(fields, second)
    if len(texts) != len(pairs) and len(texts) != 1:
        raise InvalidRequestError(
            first, f"{first} holds {len(texts)} texts and {second} {len(pairs)}; {first} must hold one, or as many"
        )

    def item(index: int, part: npt.NDArray[np.float32]) -> dict[str, Any]:
        return {"object": "score", "index": index, "score": float(part[0])}

    return _call(
        fields, model, "score", texts, lambda pooled: _list("score", model, pooled, item), pairs, (first, second)
    )


def parse_rerank(fields: Fields) -> PoolingCall:
    """The body of /rerank: one that Cohere's and Jina's clients share."""
    model, query, documents = take_model(fields), fields.take("query"), fields.take("documents")
    if not isinstance(query, str):
        raise InvalidRequestError("query", "query must be a string")
    if not isinstance(documents, list) or not documents:
        raise InvalidRequestError("documents", "documents must be a list of one or more strings")
    texts: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in documents]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("documents", "documents must hold strings, or objects with a string as their text")
    _check_number("documents", texts)
    top_n, shows_documents = fields.take("top_n"), fields.flag("return_documents", True)
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequestError("top_n", f"top_n is {repr(top_n)[:100]}; it must be an integer above 0")

    def render(pooled: Pooled) -> dict[str, Any]:
        scores = pooled.data[:, 0]
        best = np.argsort(-scores, kind="stable")[:top_n].tolist()
        results = [{"index": index, "relevance_score": float(scores[index])} for index in best]
        if shows_documents:
            results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
        return {"id": _id("rerank"), "model": model, "results": results, "usage": _usage(pooled)}

    return _call(fields, model, "score", [query], render, texts, ("query", "documents"))


def _vectors(fields: Fields, task: str, kind: str, what: str, under: str) -> PoolingCall:
    """A body that asks for vectors; each is an object of the kind `what`, and stands under the name `under`."""
    model, texts, vector = take_model(fields), _take_input(fields), _take_encoding(fields)

    def item(index: int, part: npt.NDArray[np.float32]) -> dict[str, Any]:
        return {"object": what, "index": index, under: vector(part)}

    return _call(fields, model, task, texts, lambda pooled: _list(kind, model, pooled, item))


def _call(
    fields: Fields, model: str, task: str, texts: Texts, render: Render, pairs: list[str] | None = None,
    names: tuple[str, str] = ("input", "input"),
) -> PoolingCall:  # fmt: skip
    """With all fields that are left as parameters."""
    for name in _IGNORED:
        fields.take(name)
    said = fields.take("task")
    if said is not None and said != task:
        raise InvalidRequestError("task", f"task is {str(said)[:100]!r}; this route's is {task}")
    renamed = dict.fromkeys(("text_input", "input_ids", "input_lengths"), names[0]) | {"text_pair": names[1]}
    return PoolingCall(
        model=model, task=task, texts=texts, pairs=pairs, parameters=fields.rest(), said=fields.said,
        renamed=renamed, render=render,
    )  # fmt: skip


def _take_input(fields: Fields) -> Texts:
    """`input`, or a conversation, which as in vLLM does not end with the beginning of an answer unless it says so."""
    if "messages" not in fields.rest():
        return read_prompts(fields.take("input"), "input")
    if fields.take("input") is not None:
        raise InvalidRequestError("messages", "messages and input are both given; give one of them")
    fields.provide("add_generation_prompt", False)
    conversation = take_conversation(fields)
    if "images" in conversation:
        raise InvalidRequestError("messages", "messages holds images; vectors are of text alone")
    return conversation


def _take_texts(fields: Fields, name: str) -> list[str]:
    value = fields.take(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(name, f"{name} must be a string or a list of one or more strings")
    _check_number(name, texts)
    return texts


def _check_number(name: str, texts: Sequence[Any]) -> None:
    if len(texts) > MAX_PROMPTS:
        raise InvalidRequestError(name, f"{name} holds {len(texts)} texts; at most {MAX_PROMPTS} are taken")


def _take_encoding(fields: Fields) -> Callable[[npt.NDArray[np.float32]], Any]:
    """How a vector is written."""
    encoding = _take_choice(fields, "encoding_format", _ENCODINGS)
    dtype, order = _take_choice(fields, "embed_dtype", _DTYPES), _take_choice(fields, "endianness", _ORDERS)
    if encoding == "float":
        return lambda part: part.tolist()
    is_swapped = _ORDERS[order] != sys.byteorder

    def encode(part: npt.NDArray[np.float32]) -> str:
        numbers = _DTYPES[dtype](part)
        return base64.b64encode((numbers.byteswap() if is_swapped else numbers).tobytes()).decode()

    return encode


def _take_choice(fields: Fields, name: str, allowed: Collection[str]) -> str:
    """The value of a field; the first that is allowed if it is absent."""
    fields.provide(name, next(iter(allowed)))
    value = fields.take(name)
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequestError(name, f"{name} is {repr(value)[:100]}; it must be {' or '.join(allowed)}")
    return value


def _bfloat16(part: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, to even."""
    bits = part.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


_DTYPES: Mapping[str, Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]] = {
    "float32": lambda part: part, "float16": lambda part: part.astype(np.float16), "bfloat16": _bfloat16,
}  # fmt: skip
"""Of numbers in base64, as vLLM names them."""
_ORDERS = {"native": sys.byteorder, "little": "little", "big": "big"}


def _list(
    kind: str, model: str, pooled: Pooled, item: Callable[[int, npt.NDArray[np.float32]], dict[str, Any]]
) -> dict[str, Any]:
    """The body of an answer with an item per prompt. Each item becomes JSON by itself: the encoder holds the
    interpreter's lock until it returns, and there may be millions of numbers."""
    items = [msgspec.Raw(msgspec.json.encode(item(index, part))) for index, part in enumerate(pooled.by_prompt())]
    return {
        "id": _id(kind), "object": "list", "created": int(time.time()), "model": model, "data": items,
        "usage": _usage(pooled),
    }  # fmt: skip


def _usage(pooled: Pooled) -> dict[str, int]:
    number = sum(pooled.num_prompt_tokens)
    return {"prompt_tokens": number, "total_tokens": number}


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
