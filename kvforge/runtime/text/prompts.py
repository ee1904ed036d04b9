"""What may be asked of an engine, as token ids: texts, conversations, and ids as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Number
from pathlib import Path
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.common.refusals import PROMPT
from kvforge.runtime.text.limits import TextLimits
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.conversation import checked_arguments, render_conversation
from kvforge.tokenization.files import read_tokenizer_config, special_tokens


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a chat template wrote it: its special tokens are in the text, and no others are added."""

    text: str


Prompt = str | ChatPrompt | Sequence[int]


@dataclass(frozen=True)
class PromptReader:
    """Turns prompts into token ids. ``folder`` has the tokenizer's files with the chat template; either may be None."""

    limits: TextLimits | None
    folder: Path | None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, max_seq_len: int, folder: Path | None) -> "PromptReader":
        """For an engine whose sequences have up to ``max_seq_len`` tokens."""
        return cls(None if tokenizer is None else TextLimits.of(tokenizer, max_seq_len), folder)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises RequestError where it is empty, no text, too long, or there is no tokenizer."""
        if not isinstance(prompt, str | ChatPrompt):
            return plain_list(prompt, "a prompt")
        text = prompt if isinstance(prompt, str) else prompt.text
        if not text:
            raise RequestError("is empty", "give text, or the beginning-of-text token's id", field=PROMPT)
        if self.limits is None:
            raise RequestError("this engine has no tokenizer", "give the prompt as a list of token ids")
        return self.limits.encode(text, add_special_tokens=isinstance(prompt, str))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Write a conversation ({"role", "content"} each, as OpenAI's clients send it) with the chat template.

        Args:
            chat_template: Jinja source in place of the engine's own template.
            add_generation_prompt: end with what begins the assistant's turn.
            continue_final_message: end where the last message ends, so that it is continued; needs
                ``add_generation_prompt=False``.
            tools: functions that the template shows the model, as OpenAI describes them; the answer's calls are text.
            chat_template_kwargs: what the template may be told besides, such as ``enable_thinking``.

        Raises:
            RequestError: a message cannot be used, or the template refuses it.
            KvforgeError: there is no template, or it cannot be read.
        """
        template = self.template(chat_template)
        arguments = checked_arguments(dict(chat_template_kwargs or {}), template, tools)
        listed = [dict(m) if isinstance(m, Mapping) else m for m in plain_list(messages, "messages")]
        return ChatPrompt(
            render_conversation(template, listed, tools, arguments, add_generation_prompt, continue_final_message)
        )

    def template(self, source: str | None = None) -> ChatTemplate:
        """The engine's chat template, or the one of ``source``. Raises KvforgeError where there is none, or it cannot
        be read."""
        if source is not None:
            names = {} if self.folder is None else special_tokens(read_tokenizer_config(self.folder))
            return ChatTemplate(source, names)
        if self._own_template is None:
            raise RequestError(
                "this engine has no chat template",
                "generate from plain text",
                operator="give one, by --chat-template FILE or as chat_template, or build from a checkpoint with one",
            )
        return self._own_template

    @cached_property
    def _own_template(self) -> ChatTemplate | None:
        return None if self.folder is None else ChatTemplate.from_dir(self.folder)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, texts and token ids among each other; a text, a conversation or a flat list of token ids is
    one prompt.

    Raises:
        RequestError: no list, or one of prompts with token ids that are in no list of their own.
    """
    if isinstance(prompts, str | ChatPrompt):
        return [prompts]
    listed = plain_list(prompts, "the list of prompts")
    if not any(isinstance(item, Integral) for item in listed):
        return listed
    if not all(isinstance(item, Number) for item in listed):
        raise RequestError(
            "the list of prompts has token ids that are in no list of their own",
            'give a string or a list of token ids for each prompt, such as ["Once", [5, 6, 7]]',
        )
    return [listed]


def plain_list(values: Any, name: str) -> list:
    """A list, tuple, range or array (but no bytes) as a list."""
    if hasattr(values, "tolist") and not isinstance(values, memoryview):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray, memoryview)):
        raise RequestError(
            f"is of type {type(values).__name__}", "give a string or a list of token ids for each prompt", field=name
        )
    return list(values)
