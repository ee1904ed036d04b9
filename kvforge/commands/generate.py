"""``kvforge generate``: text from an engine, streamed to standard output."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.commands.chat_options import NAMES, add_chat_options, opening, template_options
from kvforge.commands.engine_argument import add_engine_argument, engine_of
from kvforge.commands.parsers import add_command, add_kv_cache, add_threads, display_of
from kvforge.commands.remote_answers import generate_remotely
from kvforge.commands.sampling_options import add_sampling_options, sampling_options
from kvforge.commands.url_argument import add_url_options, check_for_engine, is_url
from kvforge.common.errors import KvforgeError, RequestError, first_line
from kvforge.manifest import TOKENIZER_DIR
from kvforge.runtime.prefixes.options import add_prefix_options, prefix_options
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options

if TYPE_CHECKING:
    from kvforge.runtime import LLM, RequestOutput, SamplingParams
    from kvforge.runtime.requests.guided_decoding import GuidedDecoding
    from kvforge.runtime.text.prompts import Prompt


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "generate",
        help="generate text with an engine, a checkpoint or a server",
        example='kvforge generate ENGINE --prompt "Once upon a time" --max-tokens 64',
    )
    add_engine_argument(parser, ("max_seq_len",), or_url=True)
    add_url_options(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="prompt; may be given several times (default: standard input, as one prompt)",
    )
    chat = parser.add_argument_group("chat", "each prompt is a user's message, written with the chat template")
    chat.add_argument("--chat", action="store_true", help="answer, instead of going on with the text")
    add_chat_options(chat)
    add_sampling_options(parser, max_tokens=128)
    parser.add_argument("--n", type=int, default=1, metavar="N", help="sequences for each prompt")
    guide = parser.add_mutually_exclusive_group()
    guide.add_argument("--json-schema", type=Path, metavar="FILE", help="generate JSON of the schema in this file")
    guide.add_argument("--regex", metavar="REGEX", help="generate text that matches")
    guide.add_argument("--grammar", type=Path, metavar="FILE", help="generate text of the GBNF or Lark grammar")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    parser.add_argument(
        "--logprobs",
        type=int,
        default=None,
        metavar="N",
        help="show log-probabilities of each token and of the N most probable ones",
    )
    add_kv_cache(parser)
    add_prefix_options(parser)
    parser.add_argument(
        "--max-seq-len", type=int, metavar="N", help="tokens of a sequence at most (default: the engine's limit)"
    )
    add_threads(parser)
    add_speculation_options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object for each prompt at the end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate; raises EngineError, RequestError, or KvforgeError after the output if a sequence failed."""
    chat = None if args.chat and is_url(args.engine) else _chat_options(args)
    if is_url(args.engine):
        if args.logprobs is not None and not args.json:
            raise RequestError("--logprobs of a server is written by --json", "add that, or leave it out")
        return generate_remotely(args, _guide(args), _read_input)
    from kvforge.runtime import LLM, SamplingParams

    check_for_engine(args)
    options = {**speculation_options(args), **prefix_options(args)}
    engine, _ = engine_of(args, predicts="exact_tokens" in options)
    params = SamplingParams(
        n=args.n,
        max_tokens=args.max_tokens,
        guided_decoding=_guide(args),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        **sampling_options(args, engine / TOKENIZER_DIR),
    )
    prompts: Sequence[Prompt] = args.prompt if args.prompt is not None else [_read_input()]
    llm = LLM(engine, kv_cache_gib=args.kv_cache_gib, max_seq_len=args.max_seq_len, **options)
    if chat is not None:
        first = opening(args)
        prompts = [llm.chat_prompt([*first, {"role": "user", "content": text}], **chat) for text in prompts]
    if args.json:
        results = llm.generate(prompts, params, use_tqdm=display_of(args).bars and len(prompts) > 1)
        for output in results:
            print(json.dumps(_plain(output), ensure_ascii=False))
    else:
        results = _print_streamed(llm, prompts, params)
        if args.logprobs is not None:
            _print_logprobs(llm, results, _labels(len(results), params.n))
    failed = [c for output in results for c in output.outputs if c.finish_reason == "error"]
    if failed:
        raise KvforgeError(f"{len(failed)} of {len(results) * params.n} sequences failed: {failed[0].stop_reason}.")
    return 0


def _chat_options(args: argparse.Namespace) -> dict[str, Any] | None:
    """What ``chat_prompt`` takes, None without ``--chat``."""
    if args.chat:
        return template_options(args)
    for name in NAMES:
        if getattr(args, name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} is for conversations", "add --chat, or leave it out")
    return None


def _plain(output: "RequestOutput") -> dict:
    result = asdict(output)
    for completion in result["outputs"]:
        del completion["logits"]  # the command does not ask for any
    return result


def _guide(args: argparse.Namespace) -> "GuidedDecoding | None":
    from kvforge.runtime.requests.guided_decoding import GuidedDecoding

    if args.regex is not None:
        return GuidedDecoding("regex", args.regex)
    path = args.json_schema or args.grammar
    if path is None:
        return None
    try:
        guide = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read ({first_line(error)})", "give a text file") from None
    return GuidedDecoding("ebnf_grammar" if args.grammar else "json_schema", guide)


def _read_input() -> str:
    if sys.stdin.isatty():
        print("kvforge: reading the prompt from standard input; Ctrl-D on a line of its own ends it", file=sys.stderr)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text ({error.reason})", "give UTF-8 text") from None


def _print_logprobs(llm: "LLM", results: "Sequence[RequestOutput]", labels: Sequence[str]) -> None:
    from kvforge.commands.logprobs_table import logprobs_table

    assert llm.tokenizer is not None  # prompts were text
    completions = [completion for output in results for completion in output.outputs]
    for label, completion in zip(labels, completions, strict=True):
        print(f"\n{label if len(labels) > 1 else 'log-probabilities'}\n{logprobs_table(completion, llm.tokenizer)}")


def _labels(num_prompts: int, n: int) -> list[str]:
    """What stands before each text: the number of its prompt and, of several, its own."""
    return [
        f"[{i + 1}/{num_prompts}.{j + 1}]" if n > 1 else f"[{i + 1}/{num_prompts}]"
        for i in range(num_prompts)
        for j in range(n)
    ]


def _print_streamed(llm: "LLM", prompts: "Sequence[Prompt]", params: "SamplingParams") -> "list[RequestOutput]":
    """Write texts in the order of the prompts and sequences; the first unfinished one as it grows.

    Returns the finished requests in the order of the prompts.
    """
    labels = _labels(len(prompts), params.n)
    texts, done = [""] * len(labels), [False] * len(labels)
    current, shown, results = 0, 0, {}
    if len(labels) > 1:
        sys.stdout.write(f"{labels[0]} ")
    for position, output in llm.run(prompts, params, stream=True):
        for completion in output.outputs:
            row = position * params.n + completion.index
            texts[row], done[row] = completion.text, completion.finish_reason is not None
        if output.finished:
            results[position] = output
        while current < len(labels):
            sys.stdout.write(texts[current][shown:])
            shown = len(texts[current])
            if not done[current]:
                break
            current, shown = current + 1, 0
            sys.stdout.write("\n" + (f"{labels[current]} " if current < len(labels) else ""))
        sys.stdout.flush()
    return [results[position] for position in sorted(results)]
