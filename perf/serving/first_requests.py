"""The first requests after a start of `kvforge serve --openai`: how long they wait for their first tokens.

    python -m perf.serving.first_requests [--against CHECKOUT] [--starts 5] [--entrance chat ...] [--output FILE]

Every start is of a server of its own. As soon as it says that it serves, it gets some requests at once through one
entrance, and then as many again a few times. With `--against` both checkouts serve by turns. Prints, for each entrance,
the longest wait among the first requests and among the later ones.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.manifest import load_manifest
from perf.harness.command import add_lengths, add_report, add_work, begin_report, make_parser, positive, run_program
from perf.harness.engines import ROOT, tokenizer_of
from perf.harness.tables import markdown_table
from perf.serving.load.checkout import Served, serving
from perf.serving.load.client import Answer, ask_all, ask_text, ask_tokens, infer_request
from perf.serving.load.engines import tiny_engine
from perf.serving.load.gateway import CHAT_TEMPLATE
from perf.serving.load.http import chat_text, completion_text, ensemble_text, post
from perf.serving.load.prompts import make_prompts

SERVED = ("--kv-cache-gib", "0.1", "--openai", "--openai-port", "0", "--chat-template", str(CHAT_TEMPLATE))


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as token ids."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Start:
    """One start: seconds until the server said that it serves, and then of each request until its first token."""

    entrance: str
    side: str
    ready_s: float
    first_s: list[float]
    later_s: list[list[float]]


def _gateway(path: str, ask: Callable[[str], dict[str, Any]], text_of: Callable[[dict[str, Any]], str]) -> "Ask":
    def send(served: Served, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
        bodies = [{**ask(prompt.text), "max_tokens": max_tokens, "stream": True} for prompt in prompts]
        return _post_all(served.openai + path, bodies, text_of)

    return send


def _http(served: Served, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
    bodies = [ask_text(prompt.text, max_tokens) for prompt in prompts]
    return _post_all(f"{served.http}/v2/models/ensemble/generate_stream", bodies, ensemble_text)


def _post_all(url: str, bodies: list[dict[str, Any]], text_of: Callable[[dict[str, Any]], str]) -> list[Answer]:
    with ThreadPoolExecutor(len(bodies)) as clients:
        return list(clients.map(lambda body: post(url, body, text_of), bodies))


def _grpc(served: Served, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
    inputs = [ask_tokens(prompt.token_ids, max_tokens) for prompt in prompts]
    return _ask_all(served, [infer_request("tensorrt_llm", one, "output_ids") for one in inputs])


def _guided(served: Served, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
    """Every request with a guide that was never seen: its judgement takes processor time of its own."""
    guides = [f"[a-z ]{{9}}{prompt.token_ids[-1]}[^{prompt.token_ids[-2]}]{{900}}" for prompt in prompts]
    inputs = [
        ask_text(prompt.text, max_tokens, guided_decoding_guide_type="regex", guided_decoding_guide=guide)
        for prompt, guide in zip(prompts, guides, strict=True)
    ]
    return _ask_all(served, [infer_request("ensemble", one, "text_output") for one in inputs])


def _ask_all(served: Served, requests: list[Any]) -> list[Answer]:
    return asyncio.run(ask_all(served.grpc, requests, len(requests)))[0]


Ask = Callable[[Served, Sequence[Prompt], int], list[Answer]]
ENTRANCES: dict[str, tuple[str, Ask]] = {
    "chat": (
        "gateway, chats",
        _gateway("/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}, chat_text),
    ),
    "completion": ("gateway, completions", _gateway("/completions", lambda text: {"prompt": text}, completion_text)),
    "http": ("`ensemble`, HTTP", _http),
    "grpc": ("`tensorrt_llm`, gRPC", _grpc),
    "guided": ("`ensemble`, gRPC, new guides", _guided),
}
"""What a reader calls each, and how it is asked."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start every side ``starts`` times for each entrance, by turns; returns the report."""
    engine = tiny_engine(args.work)
    tokenizer, vocab = tokenizer_of(engine), load_manifest(engine).vocab_size
    sides = {"now": ROOT} if args.against is None else {"before": args.against.resolve(), "now": ROOT}
    texts = make_prompts(tokenizer, vocab, args.requests * (1 + args.rounds), args.input_tokens, 0)
    prompts = [Prompt(text, tokenizer.encode(text)) for text in texts]
    groups = [prompts[at : at + args.requests] for at in range(0, len(prompts), args.requests)]

    def start(entrance: str, side: str) -> Start:
        began = time.monotonic()
        with serving(sides[side], engine, *SERVED) as served:
            ready = time.monotonic() - began
            first, *later = (_waits(ENTRANCES[entrance][1](served, group, args.output_tokens)) for group in groups)
        print(f"  {entrance}, {side}: ready {ready:.1f} s, first {max(first):.3f} s", file=sys.stderr, flush=True)
        return Start(entrance, side, ready, first, later)

    starts = [
        start(entrance, side)
        for turn in range(args.starts)
        for entrance in args.entrance
        for side in sorted(sides, reverse=bool(turn % 2))
    ]
    names = ("requests", "rounds", "input_tokens", "output_tokens")
    return {
        **begin_report("perf.serving.first_requests"),
        **{name: vars(args)[name] for name in names},
        "starts": [asdict(one) for one in starts],
    }


def _waits(answers: list[Answer]) -> list[float]:
    """Seconds until the first piece of each that has something, shortest first. Raises KvforgeError for a request
    without one."""
    waits = []
    for answer in answers:
        filled = [arrival for arrival, piece in zip(answer.arrivals, answer.pieces, strict=True) if piece]
        if answer.code != "OK" or not filled:
            raise KvforgeError(f"a request failed: {answer.message or 'its answer is empty'}")
        waits.append(filled[0] - answer.sent)
    return sorted(waits)


def markdown(report: dict[str, Any]) -> str:
    """The report for a reader: milliseconds, of each start the request that waited longest."""
    starts, rows = report["starts"], []
    for entrance, side in dict.fromkeys((one["entrance"], one["side"]) for one in starts):
        own = [one for one in starts if (one["entrance"], one["side"]) == (entrance, side)]
        later = [max(group) for one in own for group in one["later_s"]]
        ready = statistics.median(one["ready_s"] for one in own)
        shown = [_spread([max(one["first_s"]) for one in own]), _spread(later), f"{ready:.1f}"]
        rows.append([ENTRANCES[entrance][0], side, str(len(own)), *shown])
    head = ["entrance", "code", "starts", "first requests, ms", "later ones, ms", "start, s"]
    return (
        f"`{report['command']}`: `kvforge serve --openai` of the tiny teacher gets {report['requests']} requests of "
        f"{report['input_tokens']} tokens at once as soon as it says that it serves, and as many again "
        f"{report['rounds']} times. Time to the first token of the one that waits longest: median (least to most) over "
        "the starts, and over the later groups of all starts. The last column is the median time until the server says "
        f"that it serves. {report['machine']}.\n\n{markdown_table(head, rows, 'llrrrr')}\n"
    )


def _spread(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} ({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f})"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--against", type=Path, help="another checkout, whose code is 'before' (default: this one alone)"
    )
    parser.add_argument("--starts", type=positive, default=5, help="of each side for each entrance (default 5)")
    parser.add_argument("--entrance", nargs="+", choices=ENTRANCES, default=list(ENTRANCES))
    parser.add_argument("--requests", type=positive, default=4, help="at once (default 4)")
    parser.add_argument("--rounds", type=positive, default=3, help="of later requests (default 3)")
    add_lengths(parser, 32, 4)
    add_work(parser)
    add_report(parser, "OUTPUT.json and OUTPUT.md")
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), markdown, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
