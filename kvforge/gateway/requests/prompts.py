"""The prompts of a completion and the conversation of a chat, as token ids."""

import json
from collections.abc import Sequence
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.common.refusals import PROMPT
from kvforge.gateway.client_words import api_error
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.model import ServedModel
from kvforge.gateway.requests.request_fields import Fields
from kvforge.gateway.requests.sampling import check_length
from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.conversation import (
    FieldError,
    TemplateRefusal,
    check_is_read,
    checked_arguments,
    render_conversation,
    same_id,
)

MAX_EFFORT = 64


def completion_prompts(model: ServedModel, fields: Fields, max_prompts: int) -> list[list[int]]:
    """Token ids of `prompt`: a text, a list of texts, a list of ids, or a list of such lists. Raises ApiError."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "must be a text, token ids, or a list of them")
    if len(prompt) > max_prompts:
        raise bad_field("prompt", f"holds {len(prompt)} prompts; {max_prompts} are the most")
    special = fields.get("add_special_tokens", True)
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


def chat_text(
    model: ServedModel, fields: Fields, tools: Sequence[dict[str, Any]] | None = None, forced: bool = False
) -> str:
    """`messages` as the chat template writes them; `forced` says that the answer must be a call. Raises ApiError."""
    if model.chat_template is None:
        raise ApiError(
            400,
            f"the model {model.name} has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
            "messages",
            "no_chat_template",
        )
    open_end = fields.get("continue_final_message", False)
    if open_end and forced:
        raise bad_field("continue_final_message", "excludes a tool_choice that forces a call")
    try:
        return render_conversation(
            model.chat_template,
            fields.get("messages"),
            tools,
            template_arguments(fields, model.chat_template, tools),
            fields.get("add_generation_prompt", not open_end),
            open_end,
            same_id if model.tool_format is None else model.tool_format.template_ids(),
        )
    except TemplateRefusal as error:
        raise ApiError(400, error.sentence, "messages") from None
    except FieldError as error:
        raise api_error(error.refusal) from None


def template_arguments(
    fields: Fields, template: ChatTemplate, tools: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    """What a request says to the chat template beside its messages and tools. Raises ApiError and FieldError."""
    effort = fields.get("reasoning_effort")
    if effort is not None and (not isinstance(effort, str) or len(effort) > MAX_EFFORT):
        raise bad_field("reasoning_effort", f"must be a word of at most {MAX_EFFORT} characters")
    if effort is not None:
        check_is_read("reasoning_effort", "reasoning_effort", template, tools)
    taken = ("reasoning_effort",) if effort else ()
    arguments = checked_arguments(fields.get("chat_template_kwargs", {}), template, tools, taken)
    return arguments if effort is None else {**arguments, "reasoning_effort": effort}


def encode(model: ServedModel, text: str, special: bool, param: str, fits: bool = True) -> list[int]:
    """Token ids of a text, with the tokenizer's special ones around it where `special`. Without `fits` they are only
    counted, so that there may be none, and more than the context holds (TextLimits.encode). Raises ApiError."""
    try:
        ids = model.text_limits.encode(text, special, fits)
    except RequestError as error:
        refused = api_error(error.refusal, {PROMPT: param})
        refused.param = param
        raise refused from None
    if fits and not ids:
        raise bad_field(param, "gives no token; write more")
    return ids
