"""What all Python clients are checked with. `run.py` starts each with the gateway's address and the model's name."""

import asyncio
import inspect
import json
import sys
from collections.abc import Awaitable, Callable
from enum import Enum
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:3]
V1 = f"{URL}/v1"
KEY = "none"
EMBEDDER, EMBEDDING_SIZE = "minilm", 384
"""The server's other model."""
TEXTS = ["Paris is the capital of France.", "A cat sits on the mat.", "Bread is made of flour."]
QUESTION = "What is the capital of France?"
LONG = "word " * 30_000  # more than the model's context


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Size(BaseModel):
    width: int = Field(ge=1, le=9)
    height: int = Field(ge=1, le=9)


class Box(BaseModel):
    """Nested, with `$defs` for the enum and the model in it."""

    colour: Colour
    size: Size
    spare: list[Size] = Field(max_length=2)
    material: Literal["wood", "paper"] | None


class NotOfferedError(Exception):
    """The server says by name that it does not offer this."""


def check_vectors(vectors: list[list[float]], query: list[float] | None = None) -> None:
    """Compare embeddings of `TEXTS` with each other, and with that of `QUESTION`, which the first text answers."""
    assert [len(vector) for vector in vectors] == [EMBEDDING_SIZE] * len(TEXTS)
    assert all(abs(sum(value * value for value in vector) - 1) < 1e-3 for vector in vectors)
    if query is not None:
        scores = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
        assert max(scores) == scores[0], scores


def raises(kind: type[BaseException], function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The error that the call raises."""
    try:
        function(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


async def raises_async(kind: type[BaseException], running: Awaitable[Any]) -> Any:
    """The error that the coroutine raises."""
    try:
        await running
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def main(package: str, checks: object) -> None:
    """Print the package's version and the result of each method, as lines of JSON."""
    print(json.dumps({"package": package, "version": version(package)}))
    loop = asyncio.new_event_loop()  # one for all: clients keep connections
    asyncio.set_event_loop(loop)
    for name in vars(type(checks)):
        if name.startswith("_"):
            continue
        result, note = "passed", ""
        try:
            if inspect.iscoroutine(running := getattr(checks, name)()):
                loop.run_until_complete(running)
        except NotOfferedError as reason:
            result, note = "not offered", str(reason)
        except Exception as error:
            result, note = "failed", f"{type(error).__name__}: {error}"
        print(json.dumps({"check": name, "result": result, "note": " ".join(note.split())[:400]}), flush=True)
