"""A chat template that shows all that it is given."""

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ reasoning_effort }}{{ colour }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}:"
    "{% for name, value in c.function.arguments.items() %}"
    "{{ name }}={{ value }}{% endfor %}{% endfor %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
