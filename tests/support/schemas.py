"""Seeded random JSON schemas, modest enough for a small model to come to an end."""

import random
from typing import Any

__all__ = ["random_schema"]

WORDS = ["name", "size", "items", "flag", "kind", "value", "x", "y", "path", "count"]


def random_schema(seed: int) -> dict[str, Any]:
    """An object with a few properties."""
    return _object(random.Random(seed), depth=0)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(
        ["integer", "boolean", "string", "enum", "null", "pattern", "array", "object", "anyOf"][: 9 if depth < 3 else 6]
    )
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": _value(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [_value(rng, depth + 1), {"type": "null"}]}
    if kind == "integer":
        low = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 12)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{1,6}$", "^(ab|cd){2}-[0-9]{3}$"])}
    if kind == "enum":
        return {"enum": rng.sample(["red", "grün", 'a "quote"', 7, 1.5, None, True, "日本"], rng.randint(1, 4))}
    return {"type": kind}
