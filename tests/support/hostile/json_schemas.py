"""Random JSON schemas whose texts are of bounded length, and a plain judge of values."""

import random
import re
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


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """``value`` is as ``schema`` says; knows the words that ``random_schema`` uses."""
    if "anyOf" in schema:
        return any(is_valid(choice, value) for choice in schema["anyOf"])
    for word in ("enum", "const"):
        if word in schema:
            choices = schema["enum"] if word == "enum" else [schema["const"]]
            return any(type(value) is type(choice) and value == choice for choice in choices)
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "null":
        return value is None
    if kind == "string":
        fits = isinstance(value, str) and len(value) <= schema.get("maxLength", len(value))
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(is_valid(schema["items"], item) for item in value)
    properties = schema["properties"]
    fits = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(properties)
    return fits and all(is_valid(properties[name], item) for name, item in value.items())
