"""The form a request asks of its text: OpenAI's response_format, vLLM's structured_outputs and older guided fields."""

import re
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.gateway.client_words import GUIDE, api_error
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.requests.request_fields import refuse_others
from kvforge.runtime.requests.guided_decoding import GuidedDecoding

_OLDER = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
RESPONSE_FORMATS: dict[str, tuple[str, ...]] = {
    "text": (), "json_object": (), "json_schema": ("json_schema",), "structural_tag": ("triggers", "structures")
}  # fmt: skip
"""The types of a response_format, and the members of each beside `type`."""
JSON_SCHEMA_FIELDS = ("schema",)
JSON_SCHEMA_WITHOUT_EFFECT = {
    "name": "it names the schema to OpenAI's cache",
    "description": "a guide keeps the text to the schema, and is told nothing",
    "strict": "the text keeps to the schema in any case",
}
STRUCTURED = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def guided_decoding(fields: dict[str, Any]) -> GuidedDecoding | None:
    """The one guide that `fields` ask for. Raises ApiError (400) for several and for one that cannot be used."""
    guides = []
    for name in ("response_format", "structured_outputs", *_OLDER):
        if name in fields:
            try:
                guides += _guides_of(name, fields[name])
            except RequestError as error:
                raise api_error(error.refusal, {GUIDE: name}) from None
    found = [guide for guide in guides if guide is not None]
    if len(found) > 1:
        raise ApiError(400, "the request asks for several forms of text; choose one", "structured_outputs")
    return found[0] if found else None


def guide_field(fields: dict[str, Any]) -> str:
    """The field that asks for a form, where one does."""
    return next((name for name in ("response_format", "structured_outputs", *_OLDER) if name in fields), "")


def _guides_of(name: str, value: Any) -> list[GuidedDecoding | None]:
    if name == "response_format":
        return [_response_format(value)]
    return _structured_outputs(value) if name == "structured_outputs" else [_guide(name, _OLDER[name], value)]


def _response_format(value: Any) -> GuidedDecoding | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in RESPONSE_FORMATS:
        raise bad_field("response_format.type", "must be text, json_object or json_schema")
    refuse_others("response_format", value, ("type", *RESPONSE_FORMATS[kind]))
    if kind == "text":
        return None
    if kind == "json_object":
        return GuidedDecoding("json")
    if kind == "structural_tag":
        return GuidedDecoding("structural_tag", value)
    described = value.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        raise bad_field("response_format.json_schema", "must hold a name and the schema, an object")
    refuse_others("response_format.json_schema", described, (*JSON_SCHEMA_FIELDS, *JSON_SCHEMA_WITHOUT_EFFECT))
    return GuidedDecoding("json_schema", described["schema"])


def _structured_outputs(value: Any) -> list[GuidedDecoding | None]:
    if not isinstance(value, dict):
        raise bad_field("structured_outputs", "must be an object")
    for name in value:
        if name not in STRUCTURED:
            raise bad_field(f"structured_outputs.{name[:80]}", f"is not known; give one of {', '.join(STRUCTURED)}")
    return [_guide(f"structured_outputs.{name}", name, entry) for name, entry in value.items() if entry is not None]


def _guide(name: str, kind: str, value: Any) -> GuidedDecoding | None:
    if kind == "json_object":
        return GuidedDecoding("json") if value else None
    if kind == "json":
        if not isinstance(value, dict | str | bool):
            raise bad_field(name, "must be a JSON schema: an object or its text")
        return GuidedDecoding("json_schema", value)  # type: ignore[arg-type]
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(c, str) and c for c in value):
            raise bad_field(name, "must be a list of texts")
        return GuidedDecoding("regex", "|".join(_literal(choice) for choice in value))
    if kind == "structural_tag":
        return GuidedDecoding("structural_tag", value)
    if not isinstance(value, str):
        raise bad_field(name, "must be text")
    return GuidedDecoding("regex" if kind == "regex" else "ebnf_grammar", value)


def _literal(text: str) -> str:
    """A regular expression that matches this text only, in any dialect."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)
