"""A chat template for tests, and engines that have it."""

import shutil
from pathlib import Path

from kvforge.manifest import TOKENIZER_DIR

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def with_chat_template(engine: Path, copy: Path, source: str = TEMPLATE) -> Path:
    """Copy an engine to ``copy``, with a chat template beside its tokenizer."""
    shutil.copytree(engine, copy)
    (copy / TOKENIZER_DIR / "chat_template.jinja").write_text(source)
    return copy
