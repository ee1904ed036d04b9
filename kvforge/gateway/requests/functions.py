"""The functions that a request offers the model, and which of them it must or may call."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.languages.function import MAX_NAME, Function
from kvforge.gateway.languages.schemas import bare
from kvforge.gateway.requests.request_fields import Fields, flag, refuse_others

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 128 << 10
"""Of all tools as JSON."""
_NAME = re.compile(f"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
TOOL_WITHOUT_EFFECT = {"cache_control": "a hint; equal prefixes of prompts are kept in any case"}
"""Of a tool and of its function; no template gets to see it."""
_MUST = ("required", "any")
"""Two names of one choice: a function must be called."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tools:
    """What a request says of tools.

    Attributes:
        shown: the tools as the chat template gets them.
        functions: those that may be called.
        forced: one of them must be called.
        parallel: more than one call may be made.
        field: the field to name where they cannot be used.
    """

    shown: list[dict[str, Any]]
    functions: tuple[Function, ...]
    forced: bool
    parallel: bool
    field: str = "tools"


def read_tools(fields: Fields) -> Tools | None:
    """`tools`, `tool_choice` and `parallel_tool_calls`; None without tools. Raises ApiError."""
    parallel = fields.get("parallel_tool_calls", True)
    given = fields.get("tools", [])
    if not isinstance(given, list):
        raise bad_field("tools", "must be a list of functions")
    choice = fields.get("tool_choice", "auto")
    if not given:
        if choice not in ("none", "auto"):
            raise bad_field("tool_choice", "needs tools: give the functions that may be called")
        return None
    if len(given) > MAX_TOOLS:
        raise bad_field("tools", f"holds {len(given)} functions; {MAX_TOOLS} are the most")
    size = len(json.dumps(given, ensure_ascii=False).encode())
    if size > MAX_TOOLS_BYTES:
        raise bad_field("tools", f"has {size} bytes as JSON; {MAX_TOOLS_BYTES} are the most")
    shown: list[dict[str, Any]] = []
    functions: list[Function] = []
    for index, tool in enumerate(given):
        function, entry = _function(f"tools[{index}]", tool)
        if any(function.name == other.name for other in functions):
            raise bad_field(f"tools[{index}].function.name", f"is '{function.name}' a second time; rename one")
        functions.append(function)
        shown.append(entry)
    allowed, forced = _chosen(choice, functions)
    return Tools(shown, tuple(allowed), forced, parallel)


def _function(name: str, tool: Any) -> tuple[Function, dict[str, Any]]:
    """A tool as it may be called and as the chat template gets it."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise bad_field(name, 'must be {"type": "function", "function": {"name": ..., "parameters": ...}}')
    refuse_others(name, tool, ("type", "function", *TOOL_WITHOUT_EFFECT))
    given = {k: value for k, value in tool["function"].items() if value is not None and k not in TOOL_WITHOUT_EFFECT}
    refuse_others(f"{name}.function", given, FUNCTION_FIELDS)
    if not isinstance(given.get("name"), str) or not _NAME.fullmatch(given["name"]):
        what = f"must be 1 to {MAX_NAME} letters, digits, dots, dashes and underscores"
        raise bad_field(f"{name}.function.name", what)
    if not isinstance(given.get("description", ""), str):
        raise bad_field(f"{name}.function.description", "must be text")
    strict = flag({f"{name}.function.strict": given.pop("strict", False)}, f"{name}.function.strict")
    field, parameters = f"{name}.function.parameters", given.get("parameters", {})
    kind = parameters.get("type") or "object" if isinstance(parameters, dict) else None
    if kind != "object" and (not isinstance(kind, list) or "object" not in kind):
        raise bad_field(field, "must be a JSON schema of type object")
    try:
        schema = _closed(bare(parameters))
    except RecursionError:
        raise bad_field(field, "is nested too deeply; flatten it") from None
    return Function(given["name"], schema, strict, field), {"type": "function", "function": given}


def _closed(parameters: Any) -> dict[str, Any]:
    """The schema of a call's arguments, of bare parameters. OpenAI's ways to describe a function without parameters
    allow no member: none given, and an object whose `properties` are empty. Every other schema means what JSON Schema
    says; one that allows nothing is taken for one that says nothing."""
    if isinstance(parameters, bool):
        return {"type": "object"}
    is_empty = parameters.get("properties") == {} and not parameters.get("required")
    if not parameters or (is_empty and parameters.keys() <= {"type", "properties", "required"}):
        return _NO_PARAMETERS
    return {**parameters, "type": "object"}


def _chosen(choice: Any, functions: list[Function]) -> tuple[list[Function], bool]:
    """The functions that may be called, and whether one must."""
    if choice == "none":
        return [], False
    if choice in ("auto", *_MUST):
        return functions, choice != "auto"
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        refuse_others("tool_choice", choice, ("type", "allowed_tools"))
        return _allowed(choice.get("allowed_tools"), functions)
    name = _named(choice)
    if name is None:
        raise bad_field(
            "tool_choice",
            'must be none, auto, required, any, {"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        )
    refuse_others("tool_choice", choice, ("type", "function"))
    refuse_others("tool_choice.function", choice["function"], ("name",))
    return _found([name], functions), True


def _allowed(given: Any, functions: list[Function]) -> tuple[list[Function], bool]:
    """What `allowed_tools` leaves of the functions, and whether one of them must be called."""
    field = "tool_choice.allowed_tools"
    if not isinstance(given, dict) or given.get("mode") not in ("auto", *_MUST):
        raise bad_field(f"{field}.mode", "must be auto or required")
    refuse_others(field, given, ("mode", "tools"))
    entries = given.get("tools")
    names = [_named(entry) for entry in entries] if isinstance(entries, list) else []
    if not names or None in names:
        raise bad_field(f"{field}.tools", 'must be a list of {"type": "function", "function": {"name": ...}}')
    return _found(names, functions), given["mode"] != "auto"


def _named(choice: Any) -> str | None:
    """The function that {"type": "function", "function": {"name": ...}} names."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _found(names: Collection[str | None], functions: list[Function]) -> list[Function]:
    """The functions of these names."""
    for name in names:
        if not any(entry.name == name for entry in functions):
            raise ApiError(400, f"'tool_choice' names '{str(name)[:80]}', which is none of the tools", "tool_choice")
    return [entry for entry in functions if entry.name in names]
