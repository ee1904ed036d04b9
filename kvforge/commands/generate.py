"""``kvforge generate``: text from an engine, streamed to standard output."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvforge.common.errors import KvforgeError, RequestError, first_line
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options

if TYPE_CHECKING:
    from kvforge.runtime import LLM, RequestOutput, SamplingParams
    from kvforge.runtime.requests.guided_decoding import GuidedDecoding


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("generate", help="generate text with an engine")
    parser.add_argument("engine", type=Path, help="engine directory")
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="prompt; may be given several times (default: standard input is one prompt)",
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens at most (128)")
    parser.add_argument("--min-tokens", type=int, default=0, metavar="N", help="tokens at least (0)")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="sequences for each prompt (1)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep K tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep this probability mass")
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the most probable one"
    )
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="make sampling repeatable")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    parser.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        dest="bad_words",
        help="never generate this text; may be given several times",
    )
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
        help="with --json: log-probabilities of the N most probable tokens",
    )
    parser.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="memory of the KV cache")
    parser.add_argument(
        "--max-seq-len", type=int, metavar="N", help="tokens of a sequence at most (default: the engine's limit)"
    )
    add_speculation_options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object for each prompt at the end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate; raises EngineError, RequestError, or KvforgeError after the output if a sequence failed."""
    from kvforge.runtime import LLM, SamplingParams

    params = SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=args.stop,
        bad_words=args.bad_words,
        guided_decoding=_guide(args),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )
    options = speculation_options(args)
    prompts = args.prompt if args.prompt is not None else [_read_input()]
    llm = LLM(args.engine, kv_cache_gib=args.kv_cache_gib, max_seq_len=args.max_seq_len, **options)
    if args.json:
        results = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty() and len(prompts) > 1)
        for output in results:
            print(json.dumps(_plain(output), ensure_ascii=False))
    else:
        results = _print_streamed(llm, prompts, params)
    failed = [c for output in results for c in output.outputs if c.finish_reason == "error"]
    if failed:
        raise KvforgeError(f"{len(failed)} of {len(results) * params.n} sequences failed: {failed[0].stop_reason}.")
    return 0


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
        raise RequestError(f"{path} cannot be read ({first_line(error)}); give a text file.") from None
    return GuidedDecoding("ebnf_grammar" if args.grammar else "json_schema", guide)


def _read_input() -> str:
    if sys.stdin.isatty():
        print("kvforge: reading the prompt from standard input; Ctrl-D on a line of its own ends it", file=sys.stderr)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text ({error.reason}); give UTF-8 text.") from None


def _print_streamed(llm: "LLM", prompts: list[str], params: "SamplingParams") -> "list[RequestOutput]":
    """Write texts in the order of the prompts and sequences; the first unfinished one as it grows.

    Returns the finished requests.
    """
    labels = [
        f"[{i + 1}/{len(prompts)}.{j + 1}] " if params.n > 1 else f"[{i + 1}/{len(prompts)}] "
        for i in range(len(prompts))
        for j in range(params.n)
    ]
    texts, done = [""] * len(labels), [False] * len(labels)
    current, shown, results = 0, 0, []
    if len(labels) > 1:
        sys.stdout.write(labels[0])
    for position, output in llm.run(prompts, params, stream=True):
        for completion in output.outputs:
            row = position * params.n + completion.index
            texts[row], done[row] = completion.text, completion.finish_reason is not None
        if output.finished:
            results.append(output)
        while current < len(labels):
            sys.stdout.write(texts[current][shown:])
            shown = len(texts[current])
            if not done[current]:
                break
            current, shown = current + 1, 0
            sys.stdout.write("\n" + (labels[current] if current < len(labels) else ""))
        sys.stdout.flush()
    return results
