"""A trained draft head beside an engine's other drafters, on prompts like those that it was trained on.

    python -m perf.speculation.eagle model_defs/assets/tiny-swiftkv --write-data DATA.jsonl
    kvforge distill model_defs/assets/tiny-swiftkv HEAD --draft-head --data DATA.jsonl --length 256 --batch-size 8 \\
        --micro-batch 8 --max-steps 400 --lr 2e-3 --temperature 1 --dtype float32 --device cpu
    kvforge build model_defs/assets/tiny-swiftkv -o ENGINE --draft-head HEAD --max-draft-len 8
    python -m perf.speculation.eagle ENGINE [--always] [--in-flight 1 4] [--output perf/results/NAME]

Requests are ``perf.speculation.early_exit``'s: tasks, which the engine answers and goes on after, and documents, which
it continues. Columns are those of ``perf.speculation.suffix``; microseconds are of drafters that run before a step is
planned, and 0 for the head and the early exit, whose time is the step's.
"""

import argparse
import json
import random

from kvforge import SamplingParams
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tasks.prompt import make_example
from kvforge.tokenization.files import read_tokenizer
from perf.harness.experiment import Experiment, Report, engine_problem, number, numbers, option, output, place
from perf.speculation.early_exit import prompts_of
from perf.speculation.suffix import ALWAYS, CLOCKS, TEMPERATURE, Requests, looked_up, report_of
from perf.training.samples import LENGTH, TASKS

NUM_ROWS = 1500


def write_data(args: argparse.Namespace) -> bool:
    """Write texts of tasks to train a head on, other ones than those that are asked, where that is wanted."""
    if args.write_data is None:
        return False
    tokenizer = Tokenizer(read_tokenizer(args.engine / "tokenizer.json"))
    with args.write_data.open("w", encoding="utf-8") as out:
        for index in range(NUM_ROWS):
            rng = random.Random(f"eagle3/{index}")
            made = make_example(rng.choice(TASKS), LENGTH, lambda text: len(tokenizer.encode(text)), rng)
            out.write(json.dumps({"text": f"{made.prompt} {made.answer}."}) + "\n")
    return True


def check(args: argparse.Namespace) -> str | None:
    """Return why what is to be measured is no engine."""
    return engine_problem(args.engine) if args.write_data is None else None


def make_report(args: argparse.Namespace) -> Report:
    """Measure each number of requests in flight, greedily and sampled."""
    prompts = [prompt for workload in ("answers", "text") for prompt in prompts_of(args.engine, workload)]
    random.Random(0).shuffle(prompts)

    def requests_at(temperature: float) -> Requests:
        return [
            (prompt, SamplingParams(temperature=temperature, seed=index, max_tokens=args.num_tokens, ignore_eos=True))
            for index, prompt in enumerate(prompts)
        ]

    count = args.num_speculative_tokens
    within = {"early_exit": SpeculativeConfig("early_exit", count), "eagle3": SpeculativeConfig("eagle3", count)}
    return report_of(args, looked_up(args) | within, requests_at)


EXPERIMENT = Experiment(
    "perf.speculation.eagle", __doc__,
    options=(
        place("engine", "built with --draft-head; or a checkpoint, with --write-data"),
        place("--write-data", "write texts to train on there, and measure nothing"),
        numbers("--in-flight", [1, 4], "(default 1 4)"), TEMPERATURE,
        number("--num-tokens", 96, "of an answer (default %(default)s)"),
        number("--num-speculative-tokens", 4, "(default %(default)s)"), ALWAYS,
        option("--clock", choices=tuple(CLOCKS), default="wall", help="(default %(default)s)"),
        output("OUTPUT.json and .md"),
    ),
    measure=make_report, check=check, instead=write_data, is_dated=True, align="rrrlrrrrrrrrr",
    columns=lambda report: [(name.replace("_", " "), name) for name in report["rows"][0]],
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
