"""Costly, deadly and merely odd guides from a seed, of the kinds that once ended or froze an engine."""

import json
import random
from typing import Any

_EDGES = [-(2**63), -(2**63) + 1, 2**63 - 1, 2**63, -(2**64), 2**64, 10**40, -(10**300), 1e308, -1e-308, 0, -1]
_LITERALS = ['"a"', '"b"', "/[a-z ]/", "/[a-z ]+/", '" "', "/a*b?/", "/.{1,3}/", '""']
GUIDE_KINDS = {"guided_json": "json_schema", "guided_grammar": "ebnf_grammar", "guided_regex": "regex"}
"""The gateway's fields, and the types that Triton's models and the engine know them by."""
_NAMES = ["a", "b", "key", "x" * 40, "ü", ""]


def schema_of_edges(rng: random.Random) -> Any:
    """Numbers at the ends of what machines hold."""
    edge, other = rng.choice(_EDGES), rng.choice(_EDGES)
    return rng.choice(
        [
            {"const": edge},
            {"enum": [edge, other]},
            {"type": "integer", "minimum": edge},
            {"type": "integer", "maximum": edge},
            {"type": "number", "minimum": edge, "maximum": other},
            {"type": "integer", "exclusiveMinimum": edge, "multipleOf": rng.choice([1, 3, 7])},
            {"type": "array", "minItems": abs(int(edge)), "items": {"const": other}},
            {"type": "string", "minLength": abs(int(edge)), "maxLength": abs(int(other))},
        ]
    )


def schema_of_patterns(rng: random.Random) -> Any:
    """Patterns that must all match: the automaton of their intersection doubles with each."""
    number, start = rng.randint(2, 30), rng.randint(1, 8)
    patterns = [f".*{rng.choice('ab')}.{{{start + i}}}" for i in range(number)]
    return {"type": "string", rng.choice(["allOf", "allOf", "anyOf", "oneOf"]): [{"pattern": p} for p in patterns]}


def schema_of_depth(rng: random.Random) -> Any:
    """Schemas within schemas, alike and many."""
    schema: Any = {"type": rng.choice(["string", "integer", "null"])}
    for _ in range(rng.randint(1, 6)):
        number = rng.randint(1, 6)
        schema = rng.choice(
            [
                {"type": "object", "properties": {rng.choice(_NAMES) + str(i): schema for i in range(number)}},
                {"anyOf": [schema] * number},
                {"oneOf": [schema] * number},
                {"allOf": [schema] * number},
                {"type": "array", "items": schema, "minItems": rng.choice([0, 1, 100, 10**6])},
                {"type": "object", "additionalProperties": schema, "patternProperties": {"^.*a.{9}$": schema}},
            ]
        )
    return schema


def grammar(rng: random.Random) -> str:
    """A random grammar, ambiguous as a rule: rows of its parser's chart grow with the text."""
    names = [f"n{i}" for i in range(rng.randint(1, 5))]

    def symbol(depth: int = 0) -> str:
        kind = rng.random()
        if kind < 0.55:
            text = rng.choice(names)
        elif kind < 0.9 or depth > 1:
            text = rng.choice(_LITERALS)
        else:
            inner = [" ".join(symbol(depth + 1) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
            text = f"({' | '.join(inner)})"
        return text + rng.choice([""] * 14 + ["?", "*", "+", "{2}", "{20}", "{300}"])

    rules = []
    for name in names:
        choices = [" ".join(symbol() for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 6))]
        rules.append(f"{name}: {' | '.join([*choices, rng.choice(_LITERALS)])}")
    return "start: n0\n" + "\n".join(rules)


def expression(rng: random.Random) -> str:
    """A regular expression with counts within counts."""
    text = rng.choice(["a", ".", "[a-z]", "(foo|bar)", ".*a", "(.*a|.*b)"])
    for _ in range(rng.randint(1, 4)):
        text = rng.choice(["({0}){{{1}}}", "({0}){{1,{1}}}", "({0}|.*{0}.{{{1}}})", "({0})*a.{{{1}}}"]).format(
            text, rng.choice([2, 7, 20, 100, 1000])
        )
    return text


KNOWN = {
    "smallest integer": {"guided_json": {"const": -(2**63)}},
    "one more than the smallest": {"guided_json": {"enum": [-(2**63) + 1]}},
    "from the smallest": {"guided_json": {"type": "integer", "minimum": -(2**63)}},
    "up to the smallest": {"guided_json": {"type": "integer", "maximum": -(2**63)}},
    "fifteen patterns": {
        "guided_json": {"type": "string", "allOf": [{"pattern": f".*a.{{{i}}}"} for i in range(3, 18)]}
    },
    "twenty patterns": {
        "guided_json": {"type": "string", "allOf": [{"pattern": f".*a.{{{i}}}"} for i in range(3, 23)]}
    },
    "ambiguous": {
        "guided_grammar": "start: e\ne: " + " | ".join(" ".join("e" * k) for k in range(2, 9)) + " | /[a-z ]/"
    },
    "empty repetitions": {"guided_grammar": "start: x{100}\nx: y{100}\ny: /[a-z ]/?"},
}
"""The guides with which the kinds were found, as fields of a request to the gateway."""


def random_guide(seed: int) -> dict[str, Any]:
    """Fields of a request to the gateway."""
    rng = random.Random(seed)
    kind = seed % 5
    if kind < 3:
        schema = (schema_of_edges, schema_of_patterns, schema_of_depth)[kind](rng)
        return {"guided_json": json.dumps(schema)}
    return {"guided_grammar": grammar(rng)} if kind == 3 else {"guided_regex": expression(rng)}
