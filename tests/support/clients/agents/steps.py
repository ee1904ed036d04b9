"""The three tools of the task, with numbers that a guide can keep, and how a program reports."""

import json
import sys
from importlib.metadata import version
from typing import Annotated

from pydantic import Field

Digit = Annotated[int, Field(ge=0, le=9)]
Number = Annotated[int, Field(ge=0, le=9999)]
LAST_TOKENS = 12
"""Of an answer of random weights, which would not end."""
calls: list[list[object]] = []
"""Names and arguments, in the order in which the tools ran."""


def add(a: Digit, b: Digit) -> int:
    """Add two numbers."""
    calls.append(["add", {"a": a, "b": b}])
    return a + b


def multiply(a: Number, b: Digit) -> int:
    """Multiply two numbers."""
    calls.append(["multiply", {"a": a, "b": b}])
    return a * b


def record(value: Number) -> str:
    """Keep a number."""
    calls.append(["record", {"value": value}])
    return f"recorded {value}"


STEPS = (add, multiply, record)
TASK = "What is (1 + 2) * 4? Record it."


def report(answers: list[str], packages: tuple[str, ...]) -> None:
    """Print what one run or several have done."""
    said = {"calls": calls, "answers": answers, "versions": {name: version(name) for name in packages}}
    sys.stdout.write(json.dumps(said) + "\n")
