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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.manifest import load_manifest
from perf.harness.engines import ROOT, tokenizer_of
from perf.harness.experiment import Experiment, told
from perf.harness.options import chosen, lengths, number, output, place, work
from perf.harness.tables import columns_table, spread
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
    return {"starts": [asdict(one) for one in starts]}


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


def rows_of(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each entrance and side; of each start the request that waited longest."""
    starts = report["starts"]
    for entrance, side in dict.fromkeys((one["entrance"], one["side"]) for one in starts):
        own = [one for one in starts if (one["entrance"], one["side"]) == (entrance, side)]
        yield {
            "entrance": ENTRANCES[entrance][0],
            "side": side,
            "starts": len(own),
            "first_s": [max(one["first_s"]) for one in own],
            "later_s": [max(group) for one in own for group in one["later_s"]],
            "ready_s": statistics.median(one["ready_s"] for one in own),
        }


def markdown(report: dict[str, Any]) -> str:
    """The report for a reader: milliseconds."""
    columns = (
        ("entrance", "entrance"), ("code", "side"), ("starts", "starts"),
        ("first requests, ms", lambda row: spread(row["first_s"], 0, 1e3)),
        ("later ones, ms", lambda row: spread(row["later_s"], 0, 1e3)), ("start, s", "ready_s", ".1f"),
    )  # fmt: skip
    notes = (
        f"`kvforge serve --openai` of the tiny teacher gets {report['requests']} requests of {report['input_tokens']} "
        f"tokens at once as soon as it says that it serves, and as many again {report['rounds']} times. Time to the "
        "first token of the one that waits longest: median (least to most) over the starts, and over the later "
        "groups of all starts. The last column is the median time until the server says that it serves."
    )
    return f"{told(report)}\n\n{notes}\n\n{columns_table(columns, rows_of(report), 'llrrrr')}\n"


EXPERIMENT = Experiment(
    "perf.serving.first_requests", __doc__,
    options=(
        place("--against", "another checkout, whose code is 'before' (default: this one alone)"),
        number("--starts", 5, "of each side for each entrance (default 5)"), chosen("--entrance", list(ENTRANCES)),
        number("--requests", 4, "at once (default 4)"), number("--rounds", 3, "of later requests (default 3)"),
        lengths(32, 4), work(), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, settings=("requests", "rounds", "input_tokens", "output_tokens"), shown=markdown,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
