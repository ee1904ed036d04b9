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

from kvforge.common.errors import CheckpointError, KvforgeError, first_line
from kvforge.tokenization.files import read_tokenizer_config, special_tokens
from kvforge.tokenization.template_files import DEFAULT, read_templates

_END_OF_CONTENT = "END_OF_CONTENT_TO_BE_CONTINUED"
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What every template is given."""
TOOL_USE = "tool_use"
"""The template that conversations with tools are written by, where a checkpoint names one so."""


class ChatTemplate:
    """The templates of a checkpoint by their names, and the special tokens that they may name."""

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """One template, or several by name. Raises KvforgeError where one is not a template."""
        self.sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        self.special_tokens = dict(special_tokens or {})
        environment = _environment()
        self._takes_text: dict[str, bool] = {}
        self._takes_later_system: dict[str, bool] = {}
        self._takes_parts: dict[str, bool] = {}
        self._templates = {name: _compiled(environment, name, source) for name, source in self.sources.items()}

    @classmethod
    def from_dir(cls, directory: Path) -> "ChatTemplate | None":
        """Read the templates of a checkpoint's or engine's tokenizer files; None where there is not one.

        Raises KvforgeError for a file that cannot be read.
        """
        config = read_tokenizer_config(directory)
        sources = read_templates(directory, config)
        return cls(sources, special_tokens(config)) if sources else None

    def name_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the name of the template that writes a conversation with these tools, as transformers'
        ``apply_chat_template`` chooses it. Raises KvforgeError where there is not one."""
        if tools is not None and TOOL_USE in self.sources:
            return TOOL_USE
        if DEFAULT not in self.sources:
            raise KvforgeError(
                f"the chat templates are named {', '.join(sorted(self.sources))} and not one is named {DEFAULT}; give "
                "the one to use as a file"
            )
        return DEFAULT

    def reads(self, variable: str, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the template that writes a conversation with these tools reads what it is given under that name.
        Raises KvforgeError where there is no such template."""
        return variable in self._names_of[self.name_for(tools)]

    def takes_arguments_as_text(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the template that writes a conversation with these tools takes the arguments of calls only as JSON
        text: DeepSeek's put them together with other texts. Raises KvforgeError where there is no such template."""
        name = self.name_for(tools)
        if name not in self._takes_text:
            self._takes_text[name] = not self._shows(name, {}) and self._shows(name, "{}")
        return self._takes_text[name]

    def takes_later_system(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the template that writes a conversation with these tools writes messages of the system that are not
        the first one. Raises KvforgeError where there is no such template."""
        name = self.name_for(tools)
        if name not in self._takes_later_system:
            asked, said = {"role": "user", "content": "x"}, {"role": "system", "content": "LATER SYSTEM"}
            self._takes_later_system[name] = said["content"] in (self._probed(name, [asked, said]) or "")
        return self._takes_later_system[name]

    def _as_parts(self, name: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with their texts as lists of one part where a template writes nothing of a text, as those
        of models of images do: the model would not see what was said."""
        if name not in self._takes_parts:
            text, part = "A TEXT", {"type": "text", "text": "A TEXT"}
            shown = [self._probed(name, [{"role": "user", "content": content}]) or "" for content in (text, [part])]
            self._takes_parts[name] = text not in shown[0] and text in shown[1] and str([part]) not in shown[1]
        if not self._takes_parts[name]:
            return list(messages)
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    def _shows(self, name: str, arguments: Any) -> bool:
        """Whether a template writes a call with such arguments."""
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._probed(name, [{"role": "user", "content": "x"}, answer]) is not None

    def _probed(self, name: str, messages: list[dict[str, Any]]) -> str | None:
        """What a template writes of messages; None where it refuses them."""
        try:
            return self._templates[name].render(messages=messages, tools=None, documents=None, **self.special_tokens)
        except Exception:  # what a template computes may raise anything
            return None

    @cached_property
    def _names_of(self) -> dict[str, set[str]]:
        """What each template reads of what it is given."""
        from jinja2 import meta

        parsed = {name: self._templates[name].environment.parse(source) for name, source in self.sources.items()}
        return {name: meta.find_undeclared_variables(each) for name, each in parsed.items()}

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
        Raises KvforgeError where the template refuses the conversation, or does not read the tools."""
        name = self.name_for(tools)
        if tools and "tools" not in self._names_of[name]:
            raise KvforgeError("the chat template does not show tools to the model; leave out tools, or give another")
        try:
            return self._templates[name].render(
                messages=self._as_parts(name, messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **(arguments or {}),
            )
        except Exception as error:  # what a template computes may raise anything
            raise KvforgeError(f"the chat template refuses this conversation ({first_line(error)})") from None

    @property
    def source_with_tools(self) -> str:
        """The template that writes conversations with tools; empty where there is not one."""
        return self.sources.get(TOOL_USE, self.sources.get(DEFAULT, ""))

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


def check_chat_template(directory: Path) -> None:
    """Raise CheckpointError where a checkpoint has a chat template that cannot be read or parsed."""
    try:
        ChatTemplate.from_dir(directory)
    except CheckpointError:
        raise
    except KvforgeError as error:
        raise CheckpointError(f"{directory}: {error}") from None


def _compiled(environment: Any, name: str, source: str) -> Any:
    from jinja2 import TemplateError

    which = "The chat template" if name == DEFAULT else f"The chat template {name}"
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise KvforgeError(f"{which} is not valid ({first_line(error)}); correct it.") from None


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

    def to_json(
        value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
    ) -> str:
        """With the arguments of transformers' filter, in its order."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

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
