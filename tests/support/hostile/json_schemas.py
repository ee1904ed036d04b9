"""Random JSON schemas whose texts are of bounded length."""

import random
from typing import Any

_WORDS = ["a", "id", "name", "Größe", "x y", 'q"', "日本", ""]
_PATTERNS = ["^[a-c]{1,4}$", "^(x|yy)-[0-9]{2}$", "^[^ab]{0,3}$"]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of objects and lists nested at most ``depth`` times."""
    kinds = ["integer", "boolean", "null", "enum", "const", "text", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * 2 if depth else kinds)
    if kind == "integer":
        low = rng.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "enum":
        return {"enum": [*rng.sample(_WORDS, 3), rng.randint(0, 99), None, True]}
    if kind == "const":
        return {"const": {"k": [rng.choice(_WORDS), rng.randint(-9, 9)]}}
    if kind == "text":
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == "object":
        names = rng.sample(_WORDS, rng.randint(0, 3))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = [name for name in names if rng.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": kind}
