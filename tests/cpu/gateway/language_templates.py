"""Chat templates that write calls as the models' own ones do, and else as little as possible: the content, then the
calls."""

import json
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

Written = list[tuple[str, dict[str, Any]]]
"""Calls: a function's name and its arguments."""
_EACH = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_DONE = "{% endfor %}{% endfor %}"
_ITEMS = "{% for key, value in f.arguments.items() %}"
_DEEPSEEK = "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"

_PYTHON = "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
_ARGUMENTS = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'

TEMPLATES = {
    "hermes": _EACH + "{{ '\n' if not loop.first or m.content }}<tool_call>\n" + _ARGUMENTS + "{{ '\n' }}</tool_call>"
    + _DONE,
    "llama3_json": "{# <|start_header_id|> #}" + _EACH + "{{ '\n' if not loop.first }}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}' + _DONE,
    "mistral": _EACH + "{{ '[TOOL_CALLS][' if loop.first }}" + _ARGUMENTS + "{{ ']' if loop.last else ', ' }}" + _DONE,
    "phi4_mini": "{# <|tool|><|/tool|> #}" + _EACH + "{{ '<|tool_call|>[' if loop.first }}" + _ARGUMENTS
    + "{{ ']<|/tool_call|>' if loop.last else ', ' }}" + _DONE,
    "granite": "{# <|start_of_role|> #}" + _EACH + "{{ '<|tool_call|>[' if loop.first }}" + _ARGUMENTS
    + "{{ ']' if loop.last else ', ' }}" + _DONE,
    "gemma3": _EACH + "{{ '\n' if not loop.first }}```tool_code{{ '\n' }}{{ f.name }}(" + _PYTHON + "){{ '\n' }}```"
    + _DONE,
    "gemma4": "{% macro written(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is boolean %}{{ v | lower }}"
    "{% elif v is mapping %}{{ '{' }}{% for key, one in v | dictsort %}{{ key }}:{{ written(one) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for one in v %}{{ written(one) }}"
    "{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    + _EACH + "<|tool_call>call:{{ f.name }}{{ written(f.arguments) }}<tool_call|>" + _DONE,
    "qwen3_coder": _EACH + "{{ '\n' if not loop.first }}<tool_call>\n<function={{ f.name }}>\n" + _ITEMS
    + "<parameter={{ key }}>\n"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{ '\n' }}</parameter>{{ '\n' }}{% endfor %}</function>{{ '\n' }}</tool_call>" + _DONE,
    "glm45": _EACH + "{{ '\n' if not loop.first }}<tool_call>{{ f.name }}{{ '\n' }}" + _ITEMS
    + "<arg_key>{{ key }}</arg_key>{{ '\n' }}<arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>{{ '\n' }}{% endfor %}</tool_call>" + _DONE,
    "minimax_m2": _EACH + "{{ '\n' if loop.first and m.content }}{{ '<minimax:tool_call>' if loop.first }}"
    '\n<invoke name="{{ f.name }}">\n' + _ITEMS + '<parameter name="{{ key }}">'
    "{{ value if value is string else value | tojson }}</parameter>{{ '\n' }}{% endfor %}"
    "</invoke>{{ '\n</minimax:tool_call>' if loop.last }}" + _DONE,
    "mistral_args": _EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}" + _DONE,
    "kimi_k2": _EACH + "{{ '<|tool_calls_section_begin|>' if loop.first }}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    "{{ '<|tool_calls_section_end|>' if loop.last }}" + _DONE,
    "deepseek_v3": _EACH + "{{ '\n' if not loop.first }}" + _DEEPSEEK + "{{ c.type }}<｜tool▁sep｜>{{ f.name }}"
    "{{ '\n```json\n' + f.arguments + '\n```' }}" + _DEEPSEEK_END + _DONE,
    "deepseek_v31": _EACH + _DEEPSEEK + "{{ f.name + '<｜tool▁sep｜>' + f.arguments }}" + _DEEPSEEK_END + _DONE,
    "pythonic": _EACH + "{# as [func_name1(name=value)] #}{{ '[' if loop.first else ', ' }}{{ f.name }}("
    + _PYTHON + "){{ ']' if loop.last }}" + _DONE,
}  # fmt: skip
AS_TEXT = ("deepseek_v3", "deepseek_v31")
"""Those that take arguments as text."""


def messages(content: str, calls: Written, as_text: bool) -> list[dict[str, Any]]:
    """A conversation of one turn with these calls."""
    written = [
        {
            "id": f"functions.{name}:{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(a, ensure_ascii=False) if as_text else a},
        }
        for index, (name, a) in enumerate(calls)
    ]
    return [{"role": "assistant", "content": content, "tool_calls": written}]


def by_transformers(name: str, content: str, calls: Written) -> str:
    """What the template of a language writes."""
    rendered, _ = render_jinja_template(
        [messages(content, calls, name in AS_TEXT)], chat_template=TEMPLATES[name], return_assistant_tokens_mask=False
    )
    return str(rendered[0])
