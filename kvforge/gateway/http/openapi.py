"""/openapi.json: the application's routes with the tables that requests are read by. Nothing in it is of the model."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvforge.common.sampling_fields import SAMPLING_FIELDS
from kvforge.gateway.errors import ApiError
from kvforge.gateway.http.error_faces import MESSAGES, face_of
from kvforge.gateway.http.middleware import OPEN_PATHS
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.requests.field_descriptions import DESCRIPTIONS
from kvforge.gateway.requests.guides import RESPONSE_FORMATS, STRUCTURED
from kvforge.gateway.requests.messages import fields as messages
from kvforge.gateway.requests.request_fields import (
    CHAT,
    COMPLETIONS,
    FLAGS,
    REFUSED,
    RESPONSES_REFUSED,
    RESPONSES_WITHOUT_EFFECT,
    STREAM_OPTIONS,
    WITHOUT_EFFECT,
    Refused,
)
from kvforge.gateway.requests.request_reader import DEFAULT_MAX_TOKENS
from kvforge.gateway.requests.responses_request import KNOWN as RESPONSES
from kvforge.gateway.requests.sampling import MAX_TOKENS, MAX_TOP_LOGPROBS
from kvforge.gateway.requests.token_requests import DETOKENIZE, TOKENIZE, TOKENIZE_REFUSED
from kvforge.runtime.requests.params import INTEGERS
from kvforge.tokenization.conversation import MESSAGE_FIELDS

Schema = dict[str, Any]

_ABOUT = (
    "A field that is null is as one that is not given. An unknown field is refused with 400, in the body and in every "
    "object of it; what a field below does not allow is refused, too. Streams are server-sent events."
)
_FLAG: Schema = {"type": "boolean", "default": False}
_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, {"type": "integer"}, _IDS]}}]}


@dataclass(frozen=True)
class Body:
    """What a request may hold: the tables of its reader, the fields that it must have, schemas of its own, and the
    members of its answer."""

    known: Collection[str]
    refused: Mapping[str, Refused]
    without_effect: Mapping[str, str]
    required: tuple[str, ...]
    answer: tuple[str, ...]
    own: Mapping[str, Schema] = field(default_factory=dict)


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


_LENGTH, _TOP = _whole(1, MAX_TOKENS), _whole(0, MAX_TOP_LOGPROBS)
_ANSWER = ("id", "object", "created", "model", "choices", "usage")
BODIES = {
    "/v1/completions": Body(COMPLETIONS, REFUSED, WITHOUT_EFFECT, ("prompt",), _ANSWER, {
        "prompt": _PROMPT, "logprobs": _TOP, "max_tokens": {**_whole(0, MAX_TOKENS), "default": DEFAULT_MAX_TOKENS}}),
    "/v1/chat/completions": Body(CHAT, REFUSED, WITHOUT_EFFECT, ("messages",), _ANSWER, {
        "messages": {"type": "array", "minItems": 1, "items": {
            "type": "object", "required": ["role"], "properties": {name: {} for name in MESSAGE_FIELDS}}}}),
    "/v1/responses": Body(RESPONSES, RESPONSES_REFUSED, RESPONSES_WITHOUT_EFFECT, ("input",),
                          ("id", "object", "status", "output", "usage"), {"text": _OBJECT, "user": _TEXT}),
    MESSAGES: Body(messages.KNOWN, messages.REFUSED, messages.WITHOUT_EFFECT, ("messages", "max_tokens"),
                   ("id", "type", "role", "content", "stop_reason", "usage"), {"tool_choice": _OBJECT}),
    f"{MESSAGES}/count_tokens": Body(messages.COUNTED, messages.REFUSED, messages.COUNT_WITHOUT_EFFECT, ("messages",),
                                     ("input_tokens",), {"tool_choice": _OBJECT}),
    "/tokenize": Body(TOKENIZE, TOKENIZE_REFUSED, {}, (), ("count", "max_model_len", "tokens", "token_strs"),
                      {"prompt": _TEXT}),
    "/detokenize": Body(DETOKENIZE, {}, {}, ("tokens",), ("prompt", "content")),
}  # fmt: skip
"""By the paths that take one."""


def schemas(options: GatewayOptions) -> dict[str, Schema]:
    """A schema for each field that requests read, of any path; a Body has its own for those that differ."""
    sampling: dict[str, Schema] = {name: _whole(*bounds) for name, bounds in INTEGERS.items()}
    for name, number in SAMPLING_FIELDS.items():
        low = "exclusiveMinimum" if number.open_low else "minimum"
        kind = "integer" if number.is_whole else "number"
        sampling[name] = {"type": kind, low: number.low, "maximum": number.high}
    answers = {**_whole(1, options.max_n), "default": 1}
    return sampling | {
        **dict.fromkeys(("n", "best_of"), answers),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _LENGTH),
        **dict.fromkeys(("top_logprobs", "prompt_logprobs"), _TOP),
        **{name: {"type": "boolean", "default": default} for name, default in FLAGS.items()},
        "logprobs": _FLAG,
        **dict.fromkeys(("guided_choice", "stop_sequences"), _TEXTS),
        **dict.fromkeys(("stop_token_ids", "tokens"), _IDS),
        **dict.fromkeys(("model", "guided_regex", "guided_grammar", "content", "instructions", "reasoning_effort"),
                        _TEXT),
        **dict.fromkeys(("chat_template_kwargs", "reasoning", "thinking", "output_config", "metadata"), _OBJECT),
        "add_generation_prompt": {"type": "boolean"},
        "thinking_token_budget": _whole(0, MAX_TOKENS),
        "tools": _OBJECTS,
        "messages": {**_OBJECTS, "minItems": 1},
        "system": {"anyOf": [_TEXT, _OBJECTS]},
        "input": {"anyOf": [_TEXT, {**_OBJECTS, "minItems": 1}]},
        "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
        "stop": {"anyOf": [_TEXT, {**_TEXTS, "maxItems": options.max_stop}]},
        "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
        "guided_json": {"anyOf": [_TEXT, _OBJECT, {"type": "boolean"}]},
        "response_format": {
            "type": "object", "required": ["type"], "properties": {"type": {"enum": [*RESPONSE_FORMATS]}}
        },
        "structured_outputs": {"type": "object", "properties": {name: {} for name in STRUCTURED}},
        "stream_options": {"type": "object", "properties": dict.fromkeys(sorted(STREAM_OPTIONS), _FLAG)},
    }  # fmt: skip


def body_schema(body: Body, options: GatewayOptions) -> Schema:
    """The schema of a body: what is read, what has no effect and why, what asks for nothing of what is refused."""
    found = {**schemas(options), **body.own}
    properties = {name: found[name] if name in body.required else _or_null(found[name]) for name in sorted(body.known)}
    properties = {name: {**schema, "description": DESCRIPTIONS[name]} for name, schema in properties.items()}
    for name, reason in body.without_effect.items():
        properties.setdefault(name, {"description": f"No effect: {reason}."})
    for name, refused in body.refused.items():
        neutral = [json.dumps(value) for value in (*refused.neutral, *([[]] if refused.members else []))]
        schema = {} if neutral else {"type": "null"}  # generators of clients know no enum of lists and objects
        only = f"; may be {' or '.join(neutral)}" if neutral else ""
        properties.setdefault(name, {**schema, "description": f"Not supported: {refused.reason}{only}."})
    return {
        "type": "object", "additionalProperties": False, "required": [*body.required], "properties": properties
    }  # fmt: skip


def document(app: FastAPI, options: GatewayOptions, has_keys: bool) -> dict[str, Any]:
    """The whole document, of the routes that ``app`` has by now."""
    paths = ((route, getattr(route, "path", "/")) for route in app.routes)
    routes = [route for route, path in paths if path != "/" and not path.startswith("/page/")]
    found = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=routes)
    components: dict[str, Any] = {"schemas": {"Error": _error("/"), "MessagesError": _error(MESSAGES)}}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            ok = {**operation["responses"]["200"], "description": "The answer."}
            operation["responses"] = {"200": ok}
            statuses = {429, 500, 503} if path not in OPEN_PATHS else {503} if path == "/ready" else set()
            statuses |= {404} if "{" in path else set()
            if path in BODIES:
                name = path[1:].replace("/", "_")
                components["schemas"][name] = body_schema(BODIES[path], options)
                ref = {"$ref": f"#/components/schemas/{name}"}
                operation["requestBody"] = {"required": True, "content": _json(ref)}
                ok["content"] = _json({"type": "object", "required": [*BODIES[path].answer]})
                if "stream" in BODIES[path].known:
                    ok["content"]["text/event-stream"] = {"schema": _TEXT}
                statuses |= {400, 404, 408, 413, 504}
            if has_keys and path not in OPEN_PATHS:
                statuses.add(401)
                operation["security"] = [{"key": []}, {"x-api-key": []}]
            scope: dict[str, Any] = {"path": path, "headers": ()}
            for status in sorted(statuses):
                kind = "MessagesError" if path.startswith(MESSAGES) else "Error"
                ref = _OBJECT if path == "/ready" else {"$ref": f"#/components/schemas/{kind}"}
                number = face_of(scope).status(ApiError(status, ""))
                operation["responses"][str(number)] = {"description": HTTPStatus(status).phrase, "content": _json(ref)}
    if has_keys:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {**found, "components": components}


def _or_null(schema: Schema) -> Schema:
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _error(path: str) -> Schema:
    """The schema of the errors of a path, of what one looks like."""
    body = face_of({"path": path, "headers": ()}).body(ApiError(400, ""), "")
    members = {name: {**_OBJECT, "required": [*value]} if isinstance(value, dict) else _TEXT
               for name, value in body.items()}  # fmt: skip
    return {"type": "object", "required": [*body], "properties": members}
