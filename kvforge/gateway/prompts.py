"""The prompts of a completion and the conversation of a chat, as token ids."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvforge.common.errors import KvforgeError, RequestError
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.model import ServedModel
from kvforge.gateway.request_fields import Fields, flag
from kvforge.gateway.sampling import beyond_context, check_length
from kvforge.tokenization.chat_template import OWN_NAMES, ChatTemplate

MAX_ARGUMENTS_BYTES = 16 << 10
"""Of `chat_template_kwargs` as JSON."""
MAX_EFFORT = 64
_OWN_NAMES = OWN_NAMES | {"chat_template", "continue_final_message"}

ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = {"role", "content", "name", "tool_call_id", "refusal", "tool_calls", "function_call", "audio",
                   "annotations", "reasoning_content", "reasoning"}  # fmt: skip
_EMPTY_ONLY = ("refusal", "function_call", "audio", "annotations")


def completion_prompts(model: ServedModel, fields: Fields, max_prompts: int) -> list[list[int]]:
    """Token ids of `prompt`: a text, a list of texts, a list of ids, or a list of such lists. Raises ApiError."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "must be a text, token ids, or a list of them")
    if len(prompt) > max_prompts:
        raise bad_field("prompt", f"holds {len(prompt)} prompts; {max_prompts} are the most")
    special = flag(fields, "add_special_tokens", True)
    return [_prompt(model, entry, special) for entry in prompt]


def json_texts(model: ServedModel, given: Any, prompts: list[list[int]]) -> list[bytes]:
    """The prompts' texts for `echo`, as they were `given` or decoded: JSON strings without quotation marks."""
    texts = given if isinstance(given, list) else [given]
    if not isinstance(texts[0], str):
        texts = [model.tokenizer.decode(prompt) for prompt in prompts]
    return [json.dumps(text, ensure_ascii=False)[1:-1].encode() for text in texts]


def _prompt(model: ServedModel, prompt: Any, special: bool) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise bad_field("prompt", "is empty; give at least one character")
        return encode(model, prompt, special, "prompt")
    if isinstance(prompt, list):
        check_length(len(prompt), 1, model.max_seq_len, "prompt")  # before the entries are looked at
    if not isinstance(prompt, list) or not prompt or not all(_is_id(token) for token in prompt):
        raise bad_field("prompt", "must hold texts or non-empty lists of token ids")
    if not 0 <= min(prompt) <= max(prompt) < model.manifest.vocab_size:
        raise bad_field("prompt", f"holds ids that are none of the model's, 0 to {model.manifest.vocab_size - 1}")
    return prompt


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def chat_prompt(
    model: ServedModel, fields: Fields, tools: Sequence[dict[str, Any]] | None = None, prefix: str = ""
) -> list[int]:
    """Token ids of `messages` as the chat template writes them, and then of `prefix`. Raises ApiError."""
    if model.chat_template is None:
        raise ApiError(
            400,
            f"the model {model.name} has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
            "messages",
            "no_chat_template",
        )
    messages = _messages(fields.get("messages"), _same if model.tool_format is None else model.tool_format.template_id)
    arguments = template_arguments(fields, model.chat_template)
    open_end = flag(fields, "continue_final_message")
    if open_end and flag(fields, "add_generation_prompt"):
        raise bad_field("continue_final_message", "excludes add_generation_prompt")
    if open_end and prefix:
        raise bad_field("continue_final_message", "excludes a tool_choice that forces a call")
    try:
        if open_end:
            text = model.chat_template.render_open(messages, tools, arguments)
        else:
            generation = flag(fields, "add_generation_prompt", True)
            text = model.chat_template.render(messages, generation, tools, arguments)
    except KvforgeError as error:
        raise ApiError(400, str(error), "messages") from None
    return encode(model, text + prefix, False, "messages")


def template_arguments(fields: Fields, template: ChatTemplate) -> dict[str, Any]:
    """What a request says to the chat template beside its messages. Raises ApiError."""
    arguments = fields.get("chat_template_kwargs", {})
    if not isinstance(arguments, dict):
        raise bad_field("chat_template_kwargs", "must be an object")
    size = len(json.dumps(arguments, ensure_ascii=False).encode())
    if size > MAX_ARGUMENTS_BYTES:
        raise bad_field("chat_template_kwargs", f"has {size} bytes as JSON; {MAX_ARGUMENTS_BYTES} are the most")
    effort = fields.get("reasoning_effort")
    if effort is not None and (not isinstance(effort, str) or len(effort) > MAX_EFFORT):
        raise bad_field("reasoning_effort", f"must be a word of at most {MAX_EFFORT} characters")
    for name in arguments:
        if name in _OWN_NAMES or name in template.special_tokens or (name == "reasoning_effort" and effort):
            raise bad_field(f"chat_template_kwargs.{name[:80]}", "is given to the chat template already; leave it out")
    return arguments if effort is None else {**arguments, "reasoning_effort": effort}


def _messages(value: Any, template_id: Callable[[str], str]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise bad_field("messages", "must be a list of at least one message")
    return [_message(f"messages[{index}]", entry, template_id) for index, entry in enumerate(value)]


def _message(name: str, entry: Any, template_id: Callable[[str], str]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise bad_field(name, "must be an object with role and content")
    for field in entry:
        if field not in _MESSAGE_FIELDS:
            raise bad_field(f"{name}.{field[:80]}", "is not known; remove it")
    for field in _EMPTY_ONLY:
        if entry.get(field):
            raise bad_field(f"{name}.{field}", "is not supported; leave it out")
    if entry.get("role") not in ROLES:
        raise bad_field(f"{name}.role", f"must be one of {', '.join(ROLES)}")
    calls = _calls(f"{name}.tool_calls", entry, template_id)
    content = entry.get("content")
    text = "" if calls and content in (None, []) else _content(f"{name}.content", content)
    message: dict[str, Any] = {"role": entry["role"], "content": text}
    if calls:
        message["tool_calls"] = calls
    for field in ("name", "tool_call_id", "reasoning_content"):
        if entry.get(field) is not None:
            if not isinstance(entry[field], str):
                raise bad_field(f"{name}.{field}", "must be text")
            message[field] = template_id(entry[field]) if field == "tool_call_id" else entry[field]
    return message


def _calls(name: str, entry: dict[str, Any], template_id: Callable[[str], str]) -> list[dict[str, Any]]:
    """A message's calls as templates read them: their arguments are objects."""
    given = entry.get("tool_calls") or []
    if not isinstance(given, list) or (given and entry["role"] != "assistant"):
        raise bad_field(name, "must be a list of the assistant's calls")
    calls = []
    for index, call in enumerate(given):
        function = (
            call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
        )
        if not isinstance(function, dict) or not all(isinstance(function.get(k), str) for k in ("name", "arguments")):
            raise bad_field(f"{name}[{index}]", 'must be {"id", "type": "function", "function": {"name", "arguments"}}')
        if not isinstance(call.get("id", ""), str):
            raise bad_field(f"{name}[{index}].id", "must be text")
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise bad_field(f"{name}[{index}].function.arguments", "must be a JSON object as text")
        written = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append({"id": template_id(call["id"]), **written} if "id" in call else written)
    return calls


def _same(call_id: str) -> str:
    return call_id


def _content(name: str, content: Any) -> str:
    """A message's text; parts of type text are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_field(name, "must be text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad_field(f"{name}[{index}]", "is no text part; the model reads only text")
        texts.append(part["text"])
    return "".join(texts)


def encode(model: ServedModel, text: str, special: bool, param: str) -> list[int]:
    """Token ids of a text. Raises ApiError where it is no Unicode text or gives no token."""
    try:
        ids = model.text_limits.encode(text, special)
    except RequestError as error:
        amount, _, _ = str(error).partition(", but")
        if amount.startswith("the prompt has"):
            raise beyond_context(amount, model.max_seq_len, param) from None
        raise ApiError(400, str(error), param) from None
    if not ids:
        raise bad_field(param, "gives no token; write more")
    return ids
