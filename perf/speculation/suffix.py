"""Suffix decoding against prompt lookup and plain decoding, on traffic such as agents make.

    python -m perf.speculation.suffix ENGINE [--chat] [--in-flight 1 8 32] [--requests 96] [--output perf/results/NAME]

ENGINE is built with --max-draft-len. Requests come from ``perf.speculation.agents``: with --chat calls of tools,
without questions about records. Three engines on one session answer the same ones in the same order, ``--in-flight`` at
a time, greedily and at temperature 0.8 with seeds, by turns of a plain step's tokens or more, each time in another
order, so that what else the machine does falls on all alike. Speed is plain decoding's time over that with drafts,
prompts included, its interval a bootstrap's over blocks of ``BLOCK`` turns (95%). "cold" is the first quarter of the
turns, when other requests have written little. Tokens a step are those of a sequence's decode steps; microseconds are
the drafter's, for a sequence and step. With ``--clock cpu`` all times are CPU times, those that decide on drafting too,
for machines that do other things as well; it goes with OMP_NUM_THREADS=1. Rows of other cases in OUTPUT.json stay.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvforge import LLM, SamplingParams
from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.sessions.session import Session, load_session
from kvforge.runtime.speculation import drafting
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.step import head_draft
from perf.harness.engines import tokenizer_of
from perf.harness.experiment import Experiment, Report, engine_place, flag, number, numbers, option, output, seed
from perf.speculation.agents import records, tool_calls
from perf.speculation.fixed_length import FixedLength

ALWAYS = flag("--always", "draft --num-speculative-tokens in every step, whether it pays or not")
TEMPERATURE = option("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="(default 0 0.8)")
BLOCK = 16
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
Requests = list[tuple[list[int], SamplingParams]]


class Stream:
    """Requests that an engine answers, ``in_flight`` at a time, and the seconds of its turns and of its drafter."""

    def __init__(self, engine: LLMEngine, requests: Requests, in_flight: int, clock: Clock) -> None:
        self.engine, self._in_flight, self._clock = engine, in_flight, clock
        self._waiting, self._num_left = iter(enumerate(requests)), len(requests)
        self.texts: dict[str, list[int]] = {}
        self.turns: list[float] = []
        self.num_tokens = self._num_running = self.num_rows = 0
        self.drafter_seconds, self.num_asked = 0.0, 0
        if engine.drafting.drafter is not None:
            self._ask, engine.drafting.drafter.draft = engine.drafting.drafter.draft, self._draft  # type: ignore[method-assign]

    def _draft(self, sequences: list[Any], counts: list[int]) -> Any:
        began = self._clock()
        drafts = self._ask(sequences, counts)
        self.drafter_seconds += self._clock() - began
        self.num_asked += len(sequences)
        return drafts

    def turn(self, num_tokens: int) -> bool:
        """Go on until there are this many tokens in all; False where all requests are answered."""
        began = self._clock()
        while self.num_tokens < num_tokens and self._num_left:
            while self._num_running < self._in_flight and (request := next(self._waiting, None)) is not None:
                self.engine.add_request(str(request[0]), *request[1])
                self._num_running += 1
            for answer in self.engine.step():
                text = self.texts.setdefault(answer.request_id, [])
                self.num_rows += len(text) > 0
                text += answer.new_token_ids
                self.num_tokens += len(answer.new_token_ids)
                self._num_running -= answer.finished
                self._num_left -= answer.finished
        self.turns.append(self._clock() - began)
        return self._num_left > 0


def requests_of(args: argparse.Namespace, temperature: float) -> Iterator[tuple[list[int], SamplingParams]]:
    """Yield the prompts and how they are answered."""
    tokenizer, rng = tokenizer_of(args.engine), random.Random(args.seed)
    chat = LLM(args.engine, kv_cache_gib=0.3).chat_prompt if args.chat else None
    ask = tool_calls if chat else records(lambda text: len(tokenizer.encode(text)), args.seed)
    for index in range(args.requests):
        text = chat([{"role": "user", "content": ask(rng)}]).text if chat else ask(rng)
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=args.num_tokens, ignore_eos=not chat)
        yield tokenizer.encode(text, add_special_tokens=not chat), params


Configs = dict[str, SpeculativeConfig]


def looked_up(args: argparse.Namespace) -> Configs:
    """Return the drafters that look texts up."""
    count = args.num_speculative_tokens
    return {
        "ngram": SpeculativeConfig("ngram", count),
        "suffix": SpeculativeConfig("suffix", count, suffix_sharing="all"),
    }


def measure(
    session: Session, args: argparse.Namespace, configs: Configs, requests: Requests, in_flight: int
) -> Iterator[Report]:
    """Yield a row for each drafter."""
    streams: dict[str, Stream] = {}
    for name, config in {"plain": None, **configs}.items():
        engine = LLMEngine(session=session, kv_cache_gib=0.6, speculative=config)
        if config is not None and args.always:
            engine.drafting._lengths = FixedLength(config.num_speculative_tokens)  # type: ignore[union-attr]
        streams[name] = Stream(engine, requests, in_flight, CLOCKS[args.clock])
    order, wanted, going = list(streams), 0, True
    while going:
        wanted += in_flight
        order.append(order.pop(0))
        going = any([streams[name].turn(wanted) for name in order])
    plain = streams.pop("plain")
    for name, stream in streams.items():
        stats, turns = stream.engine.stats(), np.array([plain.turns, stream.turns]).T
        times = np.add.reduceat(turns, range(0, len(turns), BLOCK))
        picked = np.random.default_rng(0).integers(len(times), size=(2000, len(times)))
        samples = np.divide(*times[picked].sum(1).T)
        yield {
            "in_flight": in_flight,
            "requests": len(requests),
            "drafts": name,
            "tokens_per_step": (stream.num_tokens - len(stream.texts)) / stream.num_rows,
            "acceptance": stats["num_accepted_draft_tokens"] / max(stats["num_draft_tokens"], 1),
            "drafter_us": 1e6 * stream.drafter_seconds / max(stream.num_asked, 1),
            "plain_tok_s": plain.num_tokens / sum(plain.turns),
            "speed": np.divide(*times.sum(0)),
            "low": np.quantile(samples, 0.025),
            "high": np.quantile(samples, 0.975),
            "cold": np.divide(*times[: len(times) // 4 + 1].sum(0)),
            # bfloat16: a row's rounding may depend on the number of rows
            "other_texts": sum(plain.texts[key] != stream.texts[key] for key in plain.texts),
        }


def make_report(args: argparse.Namespace) -> Report:
    """Measure each number of requests in flight, greedily and sampled."""
    return report_of(args, looked_up(args), lambda temperature: list(requests_of(args, temperature)))


def report_of(args: argparse.Namespace, configs: Configs, requests_at: Callable[[float], Requests]) -> Report:
    """Measure these drafters so on the requests of each temperature."""
    drafting.time = head_draft.time = SimpleNamespace(perf_counter=CLOCKS[args.clock])  # type: ignore[attr-defined]
    session, rows = load_session(args.engine, load_manifest(args.engine)), []
    for temperature in args.temperature:
        requests = requests_at(temperature)
        for in_flight in args.in_flight:
            short = [(prompt, replace(params, max_tokens=8)) for prompt, params in requests[:in_flight]]
            list(measure(session, args, configs, short, in_flight))  # warms up
            for row in measure(session, args, configs, requests, in_flight):
                rounded = {key: round(float(x), 3) if isinstance(x, float) else x for key, x in row.items()}
                rows.append({"temperature": temperature, **rounded})
    return {"rows": rows}


EXPERIMENT = Experiment(
    "perf.speculation.suffix", __doc__,
    options=(
        engine_place(), flag("--chat", "calls of tools, written by the chat template"),
        numbers("--in-flight", [1, 8, 32], "(default 1 8 32)"),
        TEMPERATURE,
        number("--requests", 96, "of each case (default %(default)s)"),
        number("--num-tokens", 96, "of an answer (default %(default)s)"),
        number("--num-speculative-tokens", 8, "(default %(default)s)"), ALWAYS,
        option("--clock", choices=tuple(CLOCKS), default="wall", help="(default %(default)s)"), seed(),
        output("OUTPUT.json and .md"),
    ),
    measure=make_report, merged=("temperature", "in_flight", "drafts"), is_dated=True, align="rrrlrrrrrrrrr",
    columns=lambda report: [(name.replace("_", " "), name) for name in report["rows"][0]],
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
