"""A checkpoint's chat template: conversations as the text that the model was tuned on.

Templates are rendered with jinja2, which torch brings along, in the environment that transformers renders them in; so
neither distillation nor evaluation needs transformers installed.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError, first_line
from kvforge.tokenization.files import CONFIG_FILE, read_tokenizer_config, special_tokens

_END_OF_CONTENT = "END_OF_CONTENT_TO_BE_CONTINUED"
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What every template is given."""


class ChatTemplate:
    """A template of ``tokenizer_config.json`` or ``chat_template.jinja`` and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises KvforgeError where ``source`` is not a template."""
        from jinja2 import TemplateError

        self.source = source
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise KvforgeError(f"The chat template is not valid ({first_line(error)}); correct it.") from None

    @classmethod
    def from_dir(cls, directory: Path) -> "ChatTemplate | None":
        """Read the template of a checkpoint's or engine's tokenizer files; None where there is none.

        ``chat_template.jinja`` goes before ``tokenizer_config.json``; of several named ones, ``default`` is taken.
        Raises KvforgeError for a file that cannot be read.
        """
        config = read_tokenizer_config(directory)
        file = directory / "chat_template.jinja"
        source = config.get("chat_template")
        if isinstance(source, list):
            named = [entry for entry in source if isinstance(entry, Mapping) and entry.get("name") == "default"]
            source = named[-1].get("template") if named else None
        if not isinstance(source, str | None):
            raise KvforgeError(f"{directory / CONFIG_FILE} has a chat_template that is no text; correct it.")
        if file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise KvforgeError(f"{file} is not UTF-8 text; write it again.") from None
        return cls(source, special_tokens(config)) if source else None

    @cached_property
    def names(self) -> frozenset[str]:
        """What the template reads of what it is given."""
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(_environment().parse(self.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of ``messages`` ({"role", "content"} each); with ``add_generation_prompt``, up to where the
        assistant's next turn begins. ``tools`` are the functions that may be called, as OpenAI describes them,
        ``arguments`` further names that the template may use; none of OWN_NAMES and no special token's.
        Raises KvforgeError where the template refuses the conversation."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **(arguments or {}),
            )
        except Exception as error:  # what a template computes may raise anything
            raise KvforgeError(f"the chat template refuses this conversation ({first_line(error)})") from None

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of one or more messages up to the end of the last one's content, so that it can be
        continued; the other arguments are as for ``render``. Raises KvforgeError where the template refuses the
        conversation or changes that content."""
        content = messages[-1]["content"]
        marked = {**messages[-1], "content": f"{content}{_END_OF_CONTENT} "}
        text, found, rest = self.render([*messages[:-1], marked], False, tools, arguments).rpartition(_END_OF_CONTENT)
        if not found or content.strip() not in text:
            raise KvforgeError(
                "the chat template changes the last message, so it cannot be continued; use another one."
            )
        return text if rest.startswith(" ") else text.rstrip()  # a template that trims, trims the content, too


def read_template(file: Path) -> str:
    """Return the source in a file of its own. Raises KvforgeError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvforgeError(f"{file} cannot be read as a chat template ({error}); give a Jinja file.") from None


def _environment() -> Any:
    from jinja2 import TemplateError, nodes, pass_context
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %} … {% endgeneration %}`` marks what an assistant says; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    @pass_context
    def as_it_is(context: Any, value: Any) -> Any:
        return value

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        # Nothing is computed before a template is rendered: with these two, also no expression of constants.
        optimized=False,
        finalize=as_it_is,
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
