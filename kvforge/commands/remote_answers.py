"""``kvforge generate`` and ``kvforge chat`` with the URL of a server: options as fields, answers as they come."""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvforge.commands.chat_options import opening, template_options
from kvforge.commands.parsers import display_of
from kvforge.commands.url_argument import check_for_url, given, server_of
from kvforge.common.sampling_fields import API_SAMPLING
from kvforge.remote.server import RemoteServer

_SAMPLING = ("max_tokens", *API_SAMPLING, "seed", "stop", "bad_words")
_CHAT = ("system", "chat_template_kwargs")
_GENERATE = ("n", "ignore_eos", "logprobs")
_OF_GENERATE = ("prompt", "chat", "json", "json_schema", "regex", "grammar")


def fields_of(args: argparse.Namespace, guide: Any = None) -> dict[str, Any]:
    """The fields of a request that the options say; what nobody says is the server's to choose. Raises KvforgeError for
    options that are no field."""
    of_generate = (*_GENERATE, *_OF_GENERATE) if args.command == "generate" else ()
    check_for_url(args, (*_SAMPLING, *_CHAT, *of_generate))
    names = {*given(args), *(("max_tokens",) if args.max_tokens is not None else ())}
    fields = {name: getattr(args, name) for name in (*_SAMPLING, *_GENERATE) if name in names}
    if guide is not None and guide.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(guide.guide)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif guide is not None:
        fields["structured_outputs"] = {guide.kind.removeprefix("ebnf_"): guide.guide}
    return fields | template_options(args)


def generate_remotely(args: argparse.Namespace, guide: Any, read_input: Callable[[], str]) -> int:
    """Answer each prompt, one after the other; raises KvforgeError."""
    fields = fields_of(args, guide)
    if args.chat and "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": args.logprobs}
    server = server_of(args)
    prompts = args.prompt if args.prompt is not None else [read_input()]

    async def answer() -> None:
        async with server:
            fields["model"] = await model_of(args, server)
            for index, prompt in enumerate(prompts):
                user = [*opening(args), {"role": "user", "content": prompt}]
                body, path = {**fields, **({"messages": user} if args.chat else {"prompt": prompt})}, _path(args.chat)
                if args.json:
                    print(json.dumps(await server.ask(f"{server.url}/{path}", body), ensure_ascii=False), flush=True)
                else:
                    labels = [f"[{index + 1}/{len(prompts)}{f'.{j + 1}' if args.n > 1 else ''}] "
                              for j in range(args.n)]  # fmt: skip
                    await _print(server, path, body, labels if len(prompts) * args.n > 1 else [""])

    asyncio.run(answer())
    return 0


async def model_of(args: argparse.Namespace, server: RemoteServer) -> str:
    """The model to ask; says which, where the server was asked. Raises KvforgeError."""
    if args.model is not None:
        return str(args.model)
    name = await server.model()
    display_of(args).note(f"model {server.shown(name)}")
    return name


class RemoteChat:
    """Conversations with the server, as ``AsyncLLM`` has them; what a model thinks goes to standard error."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._fields, self._server = args, fields_of(args), server_of(args)

    async def start(self) -> None:
        await self._server.__aenter__()
        self._fields["model"] = await model_of(self._args, self._server)

    async def close(self) -> None:
        if hasattr(self._server, "_session"):
            await self._server.__aexit__(None, None, None)

    async def chat(self, messages: Sequence[dict[str, str]], params: Any) -> AsyncIterator[Any]:
        """Yield the answer so far; raises KvforgeError."""
        text = ""
        async for _, piece in _pieces(self._server, _path(True), {**self._fields, "messages": list(messages)}):
            text += piece
            yield SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=None)])


def _path(chat: bool) -> str:
    return "chat/completions" if chat else "completions"


async def _print(server: RemoteServer, path: str, body: dict[str, Any], labels: list[str]) -> None:
    """Write the first sequence as it grows, the others when all have ended."""
    others = [""] * len(labels)
    sys.stdout.write(labels[0])
    async for index, piece in _pieces(server, path, body):
        if index == 0:
            sys.stdout.write(piece)
            sys.stdout.flush()
        elif index < len(others):
            others[index] += piece
    print("".join(f"\n{label}{text}" for label, text in zip(labels[1:], others[1:], strict=True)), flush=True)


async def _pieces(server: RemoteServer, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[int, str]]:
    """Yield a sequence's number and what comes to its text."""
    async with contextlib.aclosing(server.events(path, body)) as events:
        async for event in events:
            choices = event.get("choices") or ()
            if not isinstance(choices, Sequence):
                raise server.strange_answer()
            for choice in choices:
                try:
                    delta = choice.get("delta") or {"content": choice.get("text")}
                    thought = delta.get("reasoning_content") or delta.get("reasoning")
                    found = int(choice.get("index", 0)), str(delta.get("content") or "")
                except (ArithmeticError, AttributeError, TypeError, ValueError):
                    raise server.strange_answer() from None
                if thought:
                    print(thought, end="", file=sys.stderr, flush=True)
                yield found
