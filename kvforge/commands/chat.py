"""``kvforge chat``: a conversation with an engine, at a terminal or from a pipe."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvforge.commands.chat_options import add_chat_options, opening, template_options
from kvforge.commands.engine_argument import add_engine_argument, engine_of
from kvforge.commands.parsers import add_command, add_kv_cache, add_threads
from kvforge.commands.remote_answers import RemoteChat
from kvforge.commands.sampling_options import add_sampling_options, sampling_options
from kvforge.commands.url_argument import add_url_options, check_for_engine, is_url
from kvforge.common.errors import KvforgeError, RequestError
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime.prefixes.options import add_prefix_options, prefix_options
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options

if TYPE_CHECKING:
    from kvforge.runtime import AsyncLLM, SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "chat",
        help="talk to an engine, a checkpoint or a server",
        description=f"Answers each line as a message. {HELP}.",
        example="kvforge chat ENGINE --temperature 0.7",
    )
    add_engine_argument(parser, ("max_seq_len",), or_url=True)
    add_url_options(parser)
    add_chat_options(parser)
    add_sampling_options(parser, max_tokens=None)
    add_kv_cache(parser)
    add_prefix_options(parser)
    parser.add_argument(
        "--max-seq-len", type=int, metavar="N", help="tokens of the conversation at most (default: the engine's limit)"
    )
    add_threads(parser)
    add_speculation_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends. At a terminal an error is shown and the conversation goes on; from a pipe it is
    raised: EngineError, RequestError, KvforgeError where an answer failed."""
    llm, params, options = (RemoteChat(args), None, {}) if is_url(args.engine) else _of_engine(args)
    at_terminal = sys.stdin.isatty()
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(llm.start())
        chat = _Chat(loop, llm, params, opening(args), options)
        if at_terminal:
            print(f"{args.engine}: {HELP}.", file=sys.stderr)
        for line in _terminal_lines() if at_terminal else _piped_lines():
            if line == "/exit":
                break
            if line == "/reset":
                chat.reset()
            elif at_terminal and line.startswith("/") and line[1:].isalpha():
                print(f"{HELP}.", file=sys.stderr)
            elif line:
                _turn(chat, line, at_terminal)
    finally:
        loop.run_until_complete(llm.close())
        loop.close()
    return 0


def _of_engine(args: argparse.Namespace) -> "tuple[AsyncLLM, SamplingParams, dict[str, Any]]":
    from kvforge.runtime import AsyncLLM, SamplingParams
    from kvforge.runtime.text.prompts import PromptReader

    check_for_engine(args)
    of_engine = {**speculation_options(args), **prefix_options(args)}
    engine, _ = engine_of(args, predicts="exact_tokens" in of_engine)
    manifest = load_manifest(engine)
    options = template_options(args)
    PromptReader(None, engine / TOKENIZER_DIR).template(options.get("chat_template"))  # before what takes time
    max_tokens = manifest.max_seq_len if args.max_tokens is None else args.max_tokens
    params = SamplingParams(max_tokens=max_tokens, **sampling_options(args, engine / TOKENIZER_DIR))
    llm = AsyncLLM(engine, kv_cache_gib=args.kv_cache_gib, max_seq_len=args.max_seq_len, **of_engine)
    return llm, params, options


class _Chat:
    """A conversation: ``messages`` are those so far."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        llm: "AsyncLLM | RemoteChat",
        params: "SamplingParams | None",
        first: list[dict[str, str]],
        options: dict[str, Any],
    ) -> None:
        self._loop, self._llm, self._params, self._options = loop, llm, params, options
        self._first = first
        self.messages = list(first)

    def reset(self) -> None:
        self.messages = list(self._first)

    def answer(self, text: str, stops_at_interrupt: bool) -> None:
        """Write the answer to standard output as it grows. An interrupt may stop it, and what was written is part of
        the conversation then. Raises KvforgeError where there is no answer; the conversation is as before then."""
        messages = [*self.messages, {"role": "user", "content": text}]
        written: list[str] = []
        task = self._loop.create_task(self._write(messages, written))
        if stops_at_interrupt:
            self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            print(" …", file=sys.stderr, end="", flush=True)
        except KeyboardInterrupt:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvforgeError):
                self._loop.run_until_complete(task)
            raise
        finally:
            if stops_at_interrupt:
                self._loop.remove_signal_handler(signal.SIGINT)
        self.messages = [*messages, {"role": "assistant", "content": "".join(written)}]

    async def _write(self, messages: list[dict[str, str]], written: list[str]) -> None:
        shown = 0
        async for output in self._llm.chat(messages, self._params, **self._options):
            completion = output.outputs[0]
            written.append(completion.text[shown:])
            shown = len(completion.text)
            sys.stdout.write(written[-1])
            sys.stdout.flush()
            if completion.finish_reason == "error":
                raise KvforgeError(f"the answer failed: {completion.stop_reason}.")


def _turn(chat: _Chat, line: str, at_terminal: bool) -> None:
    try:
        chat.answer(line, stops_at_interrupt=at_terminal)
    except KvforgeError as error:
        if not at_terminal:
            raise
        print(f"kvforge: error: {error} /reset begins anew.", file=sys.stderr)
        return
    print(flush=True)


def _terminal_lines() -> Iterator[str]:
    """What is typed, until Ctrl-D; Ctrl-C gives up a line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() takes it for editing and earlier lines
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.strip()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text ({error.reason})", "give UTF-8 text") from None
