"""The fields of /v1/messages and of the objects in them: which are read, which have no effect by nature, and which are
refused by name."""

from kvforge.common.sampling_fields import API_SAMPLING
from kvforge.gateway.requests.request_fields import Refused

SAMPLING = (*API_SAMPLING, "seed", "logit_bias")
"""Of the same names as in chats; Anthropic has temperature, top_p and top_k."""
SAME = (*SAMPLING, "model", "stream", "max_tokens", "chat_template_kwargs")
COUNTED = frozenset({"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config",
                     "chat_template_kwargs"})  # fmt: skip
"""What /v1/messages/count_tokens reads."""
KNOWN = frozenset({*SAME, *COUNTED, "stop_sequences"})
CACHE_CONTROL = {"cache_control": "a hint; equal prefixes of prompts are kept in any case"}
WITHOUT_EFFECT = {
    **CACHE_CONTROL,
    "metadata": "it names a person to whoever runs the server, and nothing is counted by person",
    "service_tier": "it is a price, and there is one",
}
COUNT_WITHOUT_EFFECT = {
    **WITHOUT_EFFECT,
    **{name: "it is said of an answer, and no answer is made" for name in (*sorted(KNOWN - COUNTED), "compaction")},
}
"""Of /v1/messages/count_tokens."""
_NO_TOOLS = "the server runs no tools and connects to no other server"
REFUSED = {
    "billing_policy": Refused("nobody is billed", ({"type": "billing_policy", "bill_to": "self"},)),
    "compaction": Refused("conversations are not summarized; ask for a summary in a message"),
    "container": Refused(_NO_TOOLS),
    "mcp_servers": Refused(_NO_TOOLS, ([],)),
    "context_management": Refused(
        "no part of a conversation is taken out; send what the model is to read",
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "diagnostics": Refused("answers are not stored, so no request is compared with an earlier one",
                           ({}, {"previous_message_id": None})),
    "fallback_credit_token": Refused("there is one model"),
    "fallbacks": Refused("there is one model", ([],)),
    "inference_geo": Refused("the server is in one place"),
    "output_format": Refused("it is an older form; give output_config.format"),
    "speed": Refused("there is one speed", ("standard",)),
    "thread": Refused("conversations are not stored; send the whole conversation", code="thread_unsupported_request"),
    "user_profile_id": Refused("there are no profiles of users"),
    "workspace_id": Refused("there are no workspaces"),
    "stop": Refused("give stop_sequences"),
    "n": Refused("a message is one answer", (1,)),
}  # fmt: skip

MESSAGE_FIELDS = ("role", "content")
BLOCK_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""The members of each type of block beside `type`."""
BLOCK_WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "text": {**CACHE_CONTROL, "citations": "notes on an answer's text, which no template reads"},
    "thinking": {"signature": "a mark of whoever wrote the block, which is not checked"},
    "redacted_thinking": {"data": "reasoning that only who encrypted it can read"},
    "tool_use": {**CACHE_CONTROL, "caller": "who called: the model, as the only one that calls here"},
    "tool_result": CACHE_CONTROL,
}
TOOL_FIELDS = ("name", "description", "input_schema", "strict")
TOOL_WITHOUT_EFFECT = {
    **CACHE_CONTROL,
    "type": "custom is the only type that is read; a tool of another one is refused",
    "eager_input_streaming": "arguments are streamed as they come in any case",
}
TOOL_REFUSED = {
    "allowed_callers": Refused("only the model calls tools", (["direct"], [])),
    "defer_loading": Refused("the model is shown all tools", (False,)),
    "input_examples": Refused("chat templates show no examples; put them into the description", ([],)),
}
CHOICE_FIELDS = ("type", "name", "disable_parallel_tool_use")
THINKING_FIELDS = ("type", "budget_tokens", "display")
OUTPUT_FIELDS = ("effort", "format")
FORMAT_FIELDS = ("type", "schema")
OMITTED = "thinking_is_omitted"
"""Key of what a request says of its answer: thinking is done and not shown."""
