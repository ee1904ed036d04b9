"""The tools of /v1/messages as the functions of a chat."""

from typing import Any

from kvforge.gateway.errors import bad_field
from kvforge.gateway.requests.messages.fields import CHOICE_FIELDS, TOOL_FIELDS, TOOL_REFUSED, TOOL_WITHOUT_EFFECT
from kvforge.gateway.requests.request_fields import Fields, flag, refuse_others

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""What a chat calls them."""


def read_tools(fields: Fields) -> Fields:
    """The chat's `tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError."""
    given = fields.get("tools", [])
    if not isinstance(given, list):
        raise bad_field("tools", "must be a list of tools")
    choice = fields.get("tool_choice", {"type": "auto"})
    kind = choice.get("type") if isinstance(choice, dict) else None
    is_named = kind == "tool" and isinstance(choice.get("name"), str)
    if not is_named and (not isinstance(kind, str) or kind not in _CHOICES):
        raise bad_field("tool_choice", 'must be {"type": "auto"}, "any", "none", or {"type": "tool", "name": ...}')
    refuse_others("tool_choice", choice, CHOICE_FIELDS if is_named else ("type", "disable_parallel_tool_use"))
    name = "tool_choice.disable_parallel_tool_use"
    one = flag({name: choice.get("disable_parallel_tool_use") or False}, name)
    asked = {"type": "function", "function": {"name": choice["name"]}} if is_named else _CHOICES[str(kind)]
    return {
        "tools": [_tool(f"tools[{index}]", tool) for index, tool in enumerate(given)],
        "tool_choice": asked,
        "parallel_tool_calls": not one,
    }


def _tool(name: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_field(name, 'must be {"name": ..., "input_schema": ...}')
    kind = tool.get("type") or "custom"
    if kind != "custom":
        what = f"is of type '{str(kind)[:80]}': only tools of your own, with an input_schema, are supported"
        raise bad_field(name, what)
    refuse_others(name, tool, (*TOOL_FIELDS, *TOOL_WITHOUT_EFFECT, *TOOL_REFUSED))
    for field, entry in TOOL_REFUSED.items():
        if tool.get(field) is not None and tool[field] not in entry.neutral:
            raise bad_field(f"{name}.{field}", f"is not supported: {entry.reason}")
    if not isinstance(tool.get("input_schema"), dict):
        raise bad_field(f"{name}.input_schema", "must be a JSON schema of type object")
    function = {field: tool[field] for field in ("name", "description", "strict") if tool.get(field) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
