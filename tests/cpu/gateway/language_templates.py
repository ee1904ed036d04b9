"""Chat templates that write calls as the models' own ones do, and else as little as possible: the content, then the
calls."""

_EACH = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_DONE = "{% endfor %}{% endfor %}"
_ITEMS = "{% for key, value in f.arguments.items() %}"
_DEEPSEEK = "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"

TEMPLATES = {
    "qwen3_coder": _EACH + "{{ '\n' if not loop.first }}<tool_call>\n<function={{ f.name }}>\n" + _ITEMS
    + "<parameter={{ key }}>\n"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{ '\n' }}</parameter>{{ '\n' }}{% endfor %}</function>{{ '\n' }}</tool_call>" + _DONE,
    "glm45": _EACH + "{{ '\n' if not loop.first }}<tool_call>{{ f.name }}{{ '\n' }}" + _ITEMS
    + "<arg_key>{{ key }}</arg_key>{{ '\n' }}<arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>{{ '\n' }}{% endfor %}</tool_call>" + _DONE,
    "mistral_args": _EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}" + _DONE,
    "deepseek_v3": _EACH + "{{ '\n' if not loop.first }}" + _DEEPSEEK + "{{ c.type }}<｜tool▁sep｜>{{ f.name }}"
    "{{ '\n```json\n' + f.arguments + '\n```' }}" + _DEEPSEEK_END + _DONE,
    "deepseek_v31": _EACH + _DEEPSEEK + "{{ f.name + '<｜tool▁sep｜>' + f.arguments }}" + _DEEPSEEK_END + _DONE,
    "pythonic": _EACH + "{# as [func_name1(name=value)] #}{{ '[' if loop.first else ', ' }}{{ f.name }}("
    "{% for key, value in f.arguments.items() %}{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ']' if loop.last }}" + _DONE,
}  # fmt: skip
AS_TEXT = ("deepseek_v3", "deepseek_v31")
"""Those that take arguments as text."""
