"""Two checkouts of kvforge serve the same engine and get the same requests, by turns.

    python -m perf.serving.versions --against CHECKOUT [--guided 0.5] [--turns 6] [--output FILE]

`--guided` is the share of requests with a guide, which generate as many tokens as the others. Prints the throughput of
both, the ratio of each turn, and the processor time of each turn's processes.
"""

import argparse
import asyncio
import statistics
import sys
from typing import Any

from kvforge.manifest import load_manifest
from perf.harness.engines import ROOT, tokenizer_of
from perf.harness.experiment import Experiment, lengths, number, option, output, place, work
from perf.serving.load.checkout import serving
from perf.serving.load.client import ask_all, ask_text, infer_request
from perf.serving.load.engines import tiny_engine
from perf.serving.load.processes import CpuWindow
from perf.serving.load.prompts import make_prompts

GUIDES = ("[a-z ]{900,}", "([a-f]{1,9} ?){900,}", "(one|two|three| )+[0-9]{900}", "[^x]{900,}")
"""None of them lets a text end before any length that is asked for."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Alternate both sides ``turns`` times, after a warm-up of each; returns the report."""
    engine = tiny_engine(args.work)
    tokenizer, vocab = tokenizer_of(engine), load_manifest(engine).vocab_size

    def requests(seed: int) -> list[Any]:
        asked = []
        for index, prompt in enumerate(make_prompts(tokenizer, vocab, args.requests, args.input_tokens, seed)):
            inputs = ask_text(prompt, args.output_tokens, end_id=-1)
            if index < args.guided * args.requests:
                guide = GUIDES[index % len(GUIDES)]
                inputs |= {"guided_decoding_guide_type": "regex", "guided_decoding_guide": guide}
            asked.append(infer_request("ensemble", inputs, "text_output"))
        return asked[::2] + asked[1::2]

    tokens = args.requests * (args.input_tokens + args.output_tokens)
    rates: dict[str, list[float]] = {"before": [], "now": []}
    cpu: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    options = ("--kv-cache-gib", "0.5")
    with serving(args.against, engine, *options) as before, serving(ROOT, engine, *options) as now:
        sides = {"before": before, "now": now}
        for served in sides.values():
            asyncio.run(ask_all(served.grpc, requests(10**6), args.concurrency))
        for turn in range(args.turns):
            for name in sorted(sides, reverse=bool(turn % 2)):
                served = sides[name]
                asked, window = requests(turn), CpuWindow(served.pid)
                _, seconds = asyncio.run(ask_all(served.grpc, asked, args.concurrency))
                cpu[name].append({role: sum(threads) for role, threads in window.read().items()})
                rates[name].append(tokens / seconds)
                print(f"  {name}: {rates[name][-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    ratios = [now / before for before, now in zip(rates["before"], rates["now"], strict=True)]
    return {
        "tok_s": rates,
        "cpu_s": cpu,
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
    }


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    rates, turns = report["tok_s"], " ".join(f"{ratio:.3f}" for ratio in report["ratios"])
    told = "{requests} requests of {input_tokens} -> {output_tokens} tokens, {concurrency} at a time, "
    told += "{guided:.0%} with a guide"
    lines = [
        told.format_map(report),
        *(f"{name:<7} median {statistics.median(rates[name]):8.0f} tokens/s" for name in rates),
        f"now / before: median {report['median_ratio']:.3f}, turns {turns}",
        "median processor seconds of a turn:",
    ]
    for role in report["cpu_s"]["now"][0]:
        turns_of = (report["cpu_s"][side] for side in ("before", "now"))
        before, now = (statistics.median(turn.get(role, 0.0) for turn in turns) for turns in turns_of)
        lines.append(f"  {role:<24} before {before:6.2f}  now {now:6.2f}")
    return "\n".join(lines)


EXPERIMENT = Experiment(
    "perf.serving.versions", __doc__,
    options=(
        place("--against", "the other checkout, whose code is 'before'", required=True),
        option("--guided", type=float, default=0.0, help="share of requests with a guide (default 0)"),
        number("--requests", 256), number("--concurrency", 64), number("--turns", 6), lengths(64, 64), work(),
        output("OUTPUT.json"),
    ),
    measure=measure, settings=("requests", "concurrency", "input_tokens", "output_tokens", "guided"), shown=table,
    is_plain=True,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
