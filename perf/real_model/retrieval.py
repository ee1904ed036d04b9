"""Whether engines of one model find a number in a long text.

    python -m perf.real_model.retrieval NAME=ENGINE ... [--length 4096 8000] [--num-prompts 8]
        [--output perf/results/NAME]

The task ``needle_single``, exact matches, with the prompts of ``perf.real_model.policies``: the same ones for all
engines, whatever a cut or a KV policy makes of them. A length that an engine does not hold with its answer is refused
before anything is asked. Rows of an earlier run in OUTPUT.json stay where they are not measured again. Writes
OUTPUT.json and .md.
"""

import argparse
from collections.abc import Iterator

from tqdm import tqdm

from kvforge.evaluation.engine import EngineGenerator, check_length
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from perf.harness.experiment import Experiment, Row, named, number, numbers, option, output
from perf.quality.answers import examples_of
from perf.real_model.policies import SEED, TASK, retrieval


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Ask every engine at every length; yields a row for each."""
    longest = max(args.length)
    for _, engine in args.engines:
        check_length(load_manifest(engine), longest)
    tokenizer = args.engines[0][1] / TOKENIZER_DIR / "tokenizer.json"
    asked = {length: examples_of((TASK,), tokenizer, length, args.num_prompts, SEED)[TASK] for length in args.length}
    for name, engine in tqdm(args.engines, unit="engine", disable=None):
        generator = EngineGenerator(engine, longest, show_progress=False)
        for length, examples in asked.items():
            yield {"name": name, **retrieval(generator, length, examples)}


EXPERIMENT = Experiment(
    "perf.real_model.retrieval", __doc__,
    options=(
        option("engines", type=named, nargs="+", metavar="NAME=ENGINE"),
        numbers("--length", [4096, 8000], "tokens of a prompt (default 4096 8000)", metavar="LENGTH"),
        number("--num-prompts", 8, "of a length (default %(default)s)"), output("OUTPUT.json and .md"),
    ),
    measure=measure, merged=("name", "length"), is_dated=True, align="lrrr",
    notes="Right answers, and the share's 95% interval (Wilson).",
    columns=(
        ("engine", "name"), ("tokens of a prompt", "length"),
        ("right", lambda row: f"{row['num_correct']} of {row['num_prompts']}"),
        ("%", lambda row: f"{100 * row['low']:.0f} to {100 * row['high']:.0f}"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
