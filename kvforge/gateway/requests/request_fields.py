"""The fields of a request body: which are read, which have no effect by nature, and which are refused by name.

A client that asks for something it would not get is told so; a value that asks for nothing (`"tools": []`,
`"store": false`) and null are accepted, because clients send those by default. An unknown name is an error, as
with OpenAI: a misspelt `max_token` must not go unnoticed.
"""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

from kvforge.common.sampling_fields import API_SAMPLING
from kvforge.common.suggestions import did_you_mean
from kvforge.gateway.errors import ApiError, bad_field

SAMPLING = frozenset({*API_SAMPLING, "n", "seed", "stop", "stop_token_ids", "logit_bias"})
"""Fields of kvforge.runtime.SamplingParams of the same name."""
GUIDES = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
COMMON = SAMPLING | GUIDES | {
    "model", "max_tokens", "logprobs", "prompt_logprobs", "stream", "stream_options", "ignore_eos",
}  # fmt: skip
COMPLETIONS = COMMON | {"prompt", "echo", "best_of", "add_special_tokens"}
CHAT = COMMON | {
    "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "continue_final_message", "tools",
    "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs",
    "thinking_token_budget",
}  # fmt: skip
FLAGS = {
    **dict.fromkeys(("stream", "echo", "ignore_eos", "continue_final_message", "return_token_strs", "add_special",
                     "with_pieces"), False),
    **dict.fromkeys(("parallel_tool_calls", "add_special_tokens", "add_generation_prompt"), True),
}  # fmt: skip
"""Fields that are true or false in every request that knows them, and what they mostly are where it does not say."""

WITHOUT_EFFECT = {
    "user": "it names a person to whoever runs the server, and nothing is counted by person",
    "safety_identifier": "it does the same under OpenAI's newer name",
    "metadata": "it is stored beside an answer, and answers are not stored",
    "store": "an answer is the same, stored or not; none is stored, and what asks for a stored one is refused",
    "service_tier": "it is a price, and there is one",
    "prompt_cache_key": "it is a hint; prefixes are found by their tokens",
    "prompt_cache_retention": "it is a hint; how long a prefix is kept depends on the memory that others need",
    "prediction": "it makes an answer faster, and changes no token",
    "spaces_between_special_tokens": "special tokens are never part of the text",
    "cache_prompt": "it is a hint of llama.cpp's; equal prefixes of prompts are kept in any case",
}
"""Of all endpoints: fields that any value may have, and why none has an effect."""

Fields = dict[str, Any]
"""Those of one request, by name, without those that are null."""


@dataclass(frozen=True)
class Refused:
    """A field that is refused unless its value asks for nothing: it is one of `neutral`, or a list of nothing but
    `members`. `code` is for programs."""

    reason: str
    neutral: tuple[Any, ...] = ()
    members: tuple[str, ...] = ()
    code: str | None = None

    def asks_nothing(self, value: Any) -> bool:
        if isinstance(value, list) and self.members:
            return all(entry in self.members for entry in value)
        return any(value == neutral for neutral in self.neutral)


_NO_FUNCTIONS = "it is OpenAI's older form; give tools and tool_choice to /v1/chat/completions"
_CHAT_ONLY = "it is for /v1/chat/completions"
_NO_BEAMS = "beam search is not supported"
REFUSED = {
    "suffix": Refused("insertion is not supported", ("",)),
    "tools": Refused(_CHAT_ONLY, ([],)),
    "tool_choice": Refused(_CHAT_ONLY, ("none", "auto")),
    "functions": Refused(_NO_FUNCTIONS, ([],)),
    "function_call": Refused(_NO_FUNCTIONS, ("none", "auto")),
    "modalities": Refused("only text is generated", (["text"],)),
    "audio": Refused("only text is generated"),
    "reasoning": Refused("give reasoning_effort, or chat_template_kwargs", ({},)),
    "include_reasoning": Refused("reasoning is returned beside the content; read the content alone", (True,)),
    "thinking": Refused("give chat_template_kwargs, with what the model's template reads"),
    "enable_thinking": Refused("give it in chat_template_kwargs"),
    "web_search_options": Refused("the server does not search the web"),
    "reasoning_effort": Refused(_CHAT_ONLY, ("none",)),
    "parallel_tool_calls": Refused(_CHAT_ONLY, (True, False)),
    "verbosity": Refused("the model has no levels of verbosity", ("medium",)),
    "repeat_penalty": Refused("give repetition_penalty", (1,)),
    "num_ctx": Refused("the context is that of the engine; leave it out"),
    "use_beam_search": Refused(_NO_BEAMS, (False,)),
    "length_penalty": Refused(_NO_BEAMS, (1,)),
    "early_stopping": Refused(_NO_BEAMS, (False,)),
    "include_stop_str_in_output": Refused("the stop string is never part of the text", (False,)),
    "skip_special_tokens": Refused("special tokens are never part of the text", (True,)),
    "chat_template": Refused("the server's chat template cannot be replaced by a request"),
    "chat_template_kwargs": Refused(_CHAT_ONLY, ({},)),
    "thinking_token_budget": Refused(_CHAT_ONLY),
    "documents": Refused("documents are not passed to the chat template; put them into a message", ([],)),
    "truncate_prompt_tokens": Refused("prompts are not cut; shorten the prompt"),
    "priority": Refused("priorities are not taken from clients", (0,)),
    "return_tokens_as_token_ids": Refused("tokens are given as text", (False,)),
    "return_token_ids": Refused("token ids are not returned", (False,)),
    "bad_words": Refused("use logit_bias", ([],)),
    "request_id": Refused("give the header x-request-id"),
    "allowed_token_ids": Refused("use logit_bias or structured_outputs", ([],)),
}

INCLUDED = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""What `include` may ask for: reasoning stands in its item as text, which can be given back; all others are of
items that no answer has."""
RESPONSES_REFUSED = {
    "previous_response_id": Refused("answers are not stored; send the whole conversation as input"),
    "conversation": Refused("conversations are not stored; send the whole conversation as input"),
    "background": Refused("answers are not stored, so that none can be fetched later", (False,)),
    "include": Refused("log-probabilities are returned by the other endpoints", members=INCLUDED),
    "prompt": Refused("prompts are not stored; give instructions and input"),
    "top_logprobs": Refused("log-probabilities are returned by the other endpoints", (0,)),
    "truncation": Refused("inputs are not cut; shorten the input", ("disabled", "auto")),
    "stream_options": Refused("the last event has the usage in any case", ({}, {"include_obfuscation": False})),
}
"""Of /v1/responses. An input that `truncation` "auto" would cut is refused in any case."""
RESPONSES_WITHOUT_EFFECT = WITHOUT_EFFECT | {
    "max_tool_calls": "it counts calls of tools that the server runs, and it runs none",
    "client_metadata": "it is what Codex says of itself to whoever runs the server",
}

STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})
STREAM_OPTIONS_REFUSED = {"include_obfuscation": Refused("events are not padded", (False,))}


def screen(
    body: dict[str, Any],
    known: Set[str],
    refused: Mapping[str, Refused] = REFUSED,
    without_effect: Collection[str] = WITHOUT_EFFECT.keys(),
) -> Fields:
    """The fields of `body` that are read, without those that are null; FLAGS are true or false. Raises ApiError (400),
    naming a field."""
    fields = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            fields[name] = flag(body, name) if name in FLAGS else value
        elif name in without_effect:
            continue
        elif name in refused:
            if not refused[name].asks_nothing(value):
                raise bad_field(name, f"is not supported: {refused[name].reason}", refused[name].code)
        else:
            hint = did_you_mean(name[:80], known)
            raise ApiError(400, f"Unknown field '{name[:80]}'{hint}", name[:80], "unknown_field")
    return fields


def refuse_others(name: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ApiError where the object that the field `name` holds has a member beside `known` that is not null."""
    for member, value in given.items():
        if member not in known and value is not None:
            raise bad_field(f"{name}.{member[:80]}", f"is not known{did_you_mean(member[:80], known) or '; remove it'}")


def flag(fields: dict[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false. Raises ApiError."""
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise bad_field(name, "must be true or false")
    return value


def integer(fields: dict[str, Any], name: str, low: int, high: int, default: int | None = None) -> int | None:
    """A field that is a whole number from `low` to `high`. Raises ApiError."""
    value = fields.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_field(name, f"must be a whole number from {low} to {high}")
    return value


@dataclass(frozen=True)
class StreamOptions:
    """`include_usage`: the counts come before the end; `continuous_usage`: and with every event."""

    include_usage: bool = False
    continuous_usage: bool = False


def stream_options(fields: dict[str, Any], stream: bool) -> StreamOptions:
    """`stream_options`. Raises ApiError."""
    options = fields.get("stream_options")
    if options is None:
        return StreamOptions()
    if not stream:
        raise bad_field("stream_options", "is only for streams: set stream to true or leave it out")
    if not isinstance(options, dict):
        raise bad_field("stream_options", "must be an object")
    refuse_others("stream_options", options, {*STREAM_OPTIONS, *STREAM_OPTIONS_REFUSED})
    for name, entry in STREAM_OPTIONS_REFUSED.items():
        if options.get(name) is not None and not entry.asks_nothing(options[name]):
            raise bad_field(f"stream_options.{name}", f"cannot be used: {entry.reason}")
    given = {f"stream_options.{name}": value for name, value in options.items() if value is not None}
    usage = flag(given, "stream_options.include_usage")
    return StreamOptions(usage, flag(given, "stream_options.continuous_usage_stats") and usage)
