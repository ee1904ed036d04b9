"""Guides of tools that are too much together, and how an answer says what they leave."""

import json

import pytest

from kvforge.gateway.answers.left_header import MAX_VALUE, left_header
from kvforge.gateway.errors import ApiError
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.tool_formats import formats
from kvforge.gateway.requests.tool_guides import ToolGuide, guides_of_tools


def wide(name: str, num_properties: int, strict: bool = False) -> Function:
    properties = {f"{name}{index}": {"type": "string", "enum": ["x" * 100]} for index in range(num_properties)}
    return Function(name, {"type": "object", "properties": properties}, strict, f"tools[{name}]")


def guides(*functions: Function) -> tuple[ToolGuide, ToolGuide | None]:
    form = formats()["hermes"]
    return guides_of_tools(functions, lambda kept: form.free(kept, True, lambda text: 5), form.unguided)


def test_schemas_that_are_too_large_together_give_way_from_the_largest_on() -> None:
    first, looser = guides(wide("a", 150), wide("b", 400), wide("c", 200, strict=True), wide("d", 300))
    assert first.left == {"b": ("*",), "d": ("*",)}
    assert '"a149"' in str(first.guide.guide) and '"c199"' in str(first.guide.guide)
    assert looser is not None and looser.left == {"a": ("*",), "b": ("*",), "d": ("*",)}
    assert '"a149"' not in str(looser.guide.guide) and '"c199"' in str(looser.guide.guide)


def test_what_is_kept_already_needs_no_looser_guide() -> None:
    first, looser = guides(wide("a", 3, strict=True), Function("b", {"type": "object", "properties": {}}))
    assert first.left == {} and looser is None


def test_strict_schemas_that_are_too_large_are_refused_by_name() -> None:
    with pytest.raises(ApiError, match="'a', which is strict, and properties cannot be kept") as error:
        guides(wide("a", 600, strict=True), wide("b", 3))
    assert error.value.param == "tools[a]"
    with pytest.raises(ApiError, match="bytes") as error:
        guides(wide("a", 300, strict=True), wide("b", 300, strict=True), wide("c", 300))
    assert error.value.param == "tools"
    odd = Function("f", {"type": "object", "properties": {"a": {"not": {"const": 1}}}}, True, "tools[0]")
    with pytest.raises(ApiError, match="'f', which is strict, and not cannot be kept"):
        guides(odd)


@pytest.mark.parametrize(
    ("name", "left"),
    [("glm45", ("format",)), ("qwen3_coder", ("format",)), ("gemma4", ("format", "minItems")), ("hermes", ())],
)
def test_what_a_language_cannot_say_of_texts_is_left(name: str, left: tuple[str, ...]) -> None:
    """And refused where the schema is strict."""
    form = formats()[name]
    tag = {"type": "array", "minItems": 2}
    properties = {"a": {"type": "string", "format": "email"}, "b": {"type": "string", "pattern": "^x"}, "tags": tag}
    schema = {"type": "object", "properties": properties}

    def made(strict: bool) -> ToolGuide:
        asked = [Function("f", schema, strict, "tools[0]")]
        return guides_of_tools(asked, lambda kept: form.free(kept, True, lambda text: 5), form.unguided)[0]

    assert made(False).left == ({"f": left} if left else {})
    if left:
        with pytest.raises(ApiError, match=f"which is strict, and {', '.join(left)} cannot be kept"):
            made(True)


def test_the_header_has_room_for_many_tools() -> None:
    left = {f"function_{index}": ["pattern", "dependentRequired"] for index in range(128)}
    ((name, value),) = left_header(left)
    assert name == b"x-kvforge-unguided" and len(value) <= MAX_VALUE
    shown = json.loads(value)
    more = shown.pop("...")
    assert len(shown) > 50 and len(shown) + more == 128 and all(left[tool] == shown[tool] for tool in shown)
    assert left_header({}) == []
