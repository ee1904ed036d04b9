"""Suffix decoding against prompt lookup and plain decoding, on traffic such as agents make.

    python -m perf.speculation.suffix ENGINE [--in-flight 1 8 32] [--requests 96] [--output perf/results/NAME]

ENGINE is built with --max-draft-len. Requests come from ``perf.speculation.agents``: with --chat calls of
tools, without questions about records. The same ones are answered in the same order by three engines on one
session, ``--in-flight`` at a time, greedily and at temperature 0.8 with seeds. They take turns of ``TURN`` tokens, each
time in another order, so that what slows the machine slows all. A ratio is the time of plain decoding over that of
drafting, prompts included: of all turns together, its interval a bootstrap's over the turns (95%). "cold" is the first
quarter of the turns, when other requests have written little. Tokens a step are those of a sequence's decode steps.
Microseconds are those of the drafter, per sequence and step. With ``--clock cpu`` all times are CPU times, those that
decide on drafting too, for machines that do other things as well; it goes with OMP_NUM_THREADS=1.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge import LLM, SamplingParams
from kvforge.common.errors import KvforgeError
from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.sessions.session import load_session
from kvforge.runtime.speculation import drafting
from kvforge.runtime.speculation.config import SpeculativeConfig
from perf.harness.command import Report, add_report, begin_dated_report, make_parser, positive, run_program
from perf.harness.engines import tokenizer_of
from perf.harness.tables import markdown_table
from perf.speculation.agents import records, tool_calls

KV_CACHE_GIB = 0.6
TURN = 64
NAMES = ("plain", "ngram", "suffix")
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


class Stream:
    """Requests that an engine answers, ``in_flight`` at a time, and what its turns took."""

    def __init__(
        self, engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]], in_flight: int, clock: Clock
    ) -> None:
        self.engine, self._in_flight, self._clock = engine, in_flight, clock
        self._waiting, self._num_left = iter(enumerate(requests)), len(requests)
        self.texts: dict[str, list[int]] = {}
        self.turns: list[float] = []
        """Seconds of each."""
        self.num_tokens = self.num_running = self.num_rows = 0
        self.drafting_seconds, self.num_asked = 0.0, 0
        drafter = engine.drafting.drafter
        if drafter is not None:
            self._time(drafter)

    def _time(self, drafter: Any) -> None:
        ask = drafter.draft

        def draft(sequences: list[Any], counts: list[int]) -> Any:
            began = self._clock()
            drafts = ask(sequences, counts)
            self.drafting_seconds += self._clock() - began
            self.num_asked += len(sequences)
            return drafts

        drafter.draft = draft

    def turn(self, num_tokens: int) -> bool:
        """Go on until there are this many tokens in all; False where all requests are answered."""
        began = self._clock()
        while self.num_tokens < num_tokens and self._num_left:
            while self.num_running < self._in_flight and (request := next(self._waiting, None)) is not None:
                self.engine.add_request(str(request[0]), *request[1])
                self.num_running += 1
            for output in self.engine.step():
                if output.finish_reason == "error":
                    raise KvforgeError(f"request {output.request_id} failed: {output.stop_reason}.")
                text = self.texts.setdefault(output.request_id, [])
                self.num_rows += len(text) > 0
                text += output.new_token_ids
                self.num_tokens += len(output.new_token_ids)
                self.num_running -= output.finish_reason is not None
                self._num_left -= output.finish_reason is not None
        self.turns.append(self._clock() - began)
        return self._num_left > 0


def requests_of(args: argparse.Namespace, temperature: float) -> Iterator[tuple[list[int], SamplingParams]]:
    """Yield the prompts and how they are answered."""
    tokenizer, rng = tokenizer_of(args.engine), random.Random(args.seed)
    chat = LLM(args.engine, kv_cache_gib=0.1).chat_prompt if args.chat else None
    ask = tool_calls if chat else records(lambda text: len(tokenizer.encode(text)), args.seed)
    for index in range(args.requests):
        text = chat([{"role": "user", "content": ask(rng)}]).text if chat else ask(rng)
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=args.num_tokens, ignore_eos=not chat)
        yield tokenizer.encode(text, add_special_tokens=not chat), params


def measure(session: Any, args: argparse.Namespace, requests: list[Any], in_flight: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to draft."""
    config = {
        "plain": None,
        "ngram": SpeculativeConfig("ngram", args.num_speculative_tokens),
        "suffix": SpeculativeConfig("suffix", args.num_speculative_tokens, suffix_sharing="all"),
    }
    streams = {
        name: Stream(
            LLMEngine(session=session, kv_cache_gib=KV_CACHE_GIB, speculative=config[name]),
            requests,
            in_flight,
            CLOCKS[args.clock],
        )
        for name in NAMES
    }
    order, wanted, going = list(NAMES), 0, True
    while going:
        wanted += TURN * min(in_flight, 8)
        order.append(order.pop(0))
        going = any([streams[name].turn(wanted) for name in order])
    plain = streams["plain"]
    for name in NAMES[1:]:
        stream, stats = streams[name], streams[name].engine.stats()
        times = np.array([plain.turns, stream.turns]).T
        cold = len(times) // 4
        yield {
            "drafts": name,
            "in_flight": in_flight,
            "turns": len(times),
            "tokens": stream.num_tokens,
            "tokens_per_step": (stream.num_tokens - len(stream.texts)) / stream.num_rows,
            "ratio": ratio(times),
            "interval": interval(times),
            "cold_ratio": ratio(times[:cold]),
            "warm_ratio": ratio(times[cold:]),
            "acceptance": stats["num_accepted_draft_tokens"] / max(stats["num_draft_tokens"], 1),
            "drafter_us": 1e6 * stream.drafting_seconds / max(stream.num_asked, 1),
            "plain_tok_s": plain.num_tokens / sum(plain.turns),
            # bfloat16: a row's rounding may depend on the number of rows
            "texts_that_differ": sum(plain.texts[key] != stream.texts[key] for key in plain.texts),
        }


def ratio(times: np.ndarray) -> float:
    """Plain time over the other's, of turns [n, 2]."""
    plain, other = times.sum(0)
    return float(plain / other)


def interval(times: np.ndarray) -> list[float]:
    """Bounds of its 95% bootstrap interval."""
    picked = np.random.default_rng(0).integers(len(times), size=(2000, len(times)))
    plain, other = times[picked].sum(1).T
    return [float(bound) for bound in np.quantile(plain / other, (0.025, 0.975))]


def make_report(args: argparse.Namespace) -> Report:
    """Measure each number of requests in flight, greedily and sampled."""
    drafting.time = SimpleNamespace(perf_counter=CLOCKS[args.clock])  # type: ignore[attr-defined]
    session, rows = load_session(args.engine, load_manifest(args.engine)), []
    cases = [(temperature, in_flight) for temperature in (0.0, 0.8) for in_flight in args.in_flight]
    for temperature, in_flight in tqdm(cases, disable=None):
        requests = list(requests_of(args, temperature))
        rows += [{"temperature": temperature, **row} for row in measure(session, args, requests, in_flight)]
    return {**begin_dated_report("perf.speculation.suffix"), "rows": rows}


def markdown(report: Report) -> str:
    """A row for each case."""
    head = ["temperature", "in flight", "drafts", "tokens a step", "accepted", "drafter, µs", "plain tok/s",
            "speed over plain", "95% interval", "cold", "warm", "other texts"]  # fmt: skip
    lines = [f"`{report['command']}`, {report['date']}, {report['machine']}", ""]
    return "\n".join([*lines, markdown_table(head, [_cells(row) for row in report["rows"]], "rrlrrrrrlrrr")]) + "\n"


def _cells(row: dict[str, Any]) -> list[Any]:
    low, high = row["interval"]
    return [
        *(row["temperature"], row["in_flight"], row["drafts"], f"{row['tokens_per_step']:.2f}"),
        *(f"{row['acceptance']:.0%}", f"{row['drafter_us']:.0f}", f"{row['plain_tok_s']:.0f}"),
        *(f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}", f"{row['cold_ratio']:.2f}", f"{row['warm_ratio']:.2f}"),
        row["texts_that_differ"],
    ]


def main() -> int:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--chat", action="store_true", help="calls of tools, written by the chat template")
    parser.add_argument("--in-flight", type=positive, nargs="+", default=[1, 8, 32], help="(default 1 8 32)")
    parser.add_argument("--requests", type=positive, default=96, help="of each case (default %(default)s)")
    parser.add_argument("--num-tokens", type=positive, default=96, help="of an answer (default %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=positive, default=8, help="(default %(default)s)")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_report(parser, "OUTPUT.json and .md")
    args = parser.parse_args()
    return run_program(args, lambda: make_report(args), markdown, markdown=True)


if __name__ == "__main__":
    raise SystemExit(main())
