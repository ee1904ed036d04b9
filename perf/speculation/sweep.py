"""What speculation gives for each draft length and acceptance, predicted and measured, and one real draft model.

    python -m perf.speculation.sweep ENGINE [--batch 1] [--lengths 1 2 3 4 5 6 7 8] [--acceptance 0.5 0.8 0.95 1]
    python -m perf.speculation.sweep TEACHER --draft-engine STUDENT [--batch 1] [--lengths 2 4]

A controlled drafter knows the engine's text and spoils each token with probability 1 - a, so that drafts cost nothing
and are right with probability a. Expected tokens a step are (1 - a^(g+1)) / (1 - a) for g drafts (Leviathan et al.,
arXiv 2211.17192, equation 1); the step's cost at each g is measured, and the speed-up predicted of both is set beside
the measured one. With a draft engine, prompts are of kvforge/tasks and drafts are the draft model's.

Cells are added to OUTPUT.json, so that a sweep can be run in parts; the table and the plot are made of all of them.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.bench.workload import FIRST_TOKEN_ID
from kvforge.manifest import Manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_model import make_drafter
from kvforge.runtime.speculation.drafter import Draft
from kvforge.runtime.speculation.drafting import NoDrafting
from kvforge.tasks.prompt import make_examples
from perf.harness import files
from perf.harness.batch import Batch
from perf.harness.command import command_line, make_parser, run_main
from perf.harness.engines import tokenizer_of
from perf.harness.files import merge_rows, read_json
from perf.harness.machine import describe_threads
from perf.harness.options import engine_place, option, output, seed
from perf.harness.plots import panels
from perf.harness.tables import columns_table
from perf.speculation.fixed_length import FixedDrafting

PROMPT_TOKENS = 128
WARM_UP = 4
"""Steps that are not counted, after the prompts."""


class ControlledDrafter:
    """Drafts the known text of each request, each token wrong with probability ``1 - acceptance``."""

    def __init__(self, texts: Mapping[str, list[int]], acceptance: float, vocab_size: int, seed: int) -> None:
        self._texts, self._acceptance, self._vocab_size = texts, acceptance, vocab_size
        self._random = random.Random(seed)

    def draft(self, sequences: list[Sequence], counts: list[int]) -> list[Draft]:
        """Return drafts of exactly ``counts`` tokens, as far as the text is known."""
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            start = sequence.num_generated
            text = self._texts[sequence.request_id][start : start + count]
            drafts.append(Draft(tuple(map(self._spoil, text))))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def _spoil(self, token: int) -> int:
        return token if self._random.random() < self._acceptance else (token + 1) % self._vocab_size


def run(engine: LLMEngine, prompts: list[list[int]], num_tokens: int, temperature: float = 0.0) -> dict[str, Any]:
    """Serve the prompts together until each has ``num_tokens`` more tokens than after ``WARM_UP`` steps; returns texts,
    tokens and seconds of the steps counted, and what became of the drafts."""
    before = engine.stats()
    length = num_tokens + (WARM_UP + 2) * 10
    params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
    batch = Batch(engine, prompts, params)
    batch.start()
    for _ in range(WARM_UP):
        batch.step()
    starts = [len(text) for text in batch.tokens]
    seconds, counts = [], []
    while all(len(text) - start < num_tokens for text, start in zip(batch.tokens, starts, strict=True)):
        begin = time.perf_counter()
        counts.append(batch.step())
        seconds.append(time.perf_counter() - begin)
    if temperature == 0 and not engine.drafting.is_on:
        batch.finish()  # the whole text, for the controlled drafter
    texts = {str(index): text for index, text in enumerate(batch.tokens)}
    for request_id in texts:
        engine.abort(request_id)
    after = engine.stats()
    drafted, accepted = (after[key] - before[key] for key in ("num_draft_tokens", "num_accepted_draft_tokens"))
    return {
        "texts": texts, "tok_s": sum(counts) / sum(seconds),
        "tokens_per_step": sum(counts) / len(counts) / len(prompts), "step_ms": 1e3 * statistics.median(seconds),
        "drafted": drafted, "accepted": accepted,
    }  # fmt: skip


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens a step of ``length`` drafts that are right with probability ``acceptance``, each for itself."""
    return sum(acceptance**i for i in range(length + 1))


def cell_of(result: dict[str, Any], plain: dict[str, Any], **names: Any) -> dict[str, Any]:
    """Return what a run with drafts says beside the one without."""
    return {
        **names, **{name: result[name] for name in ("tokens_per_step", "step_ms", "tok_s", "drafted", "accepted")},
        "plain_step_ms": plain["step_ms"], "plain_tok_s": plain["tok_s"], "speedup": result["tok_s"] / plain["tok_s"],
    }  # fmt: skip


def controlled(engine: LLMEngine, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every length and acceptance on random prompts, greedy."""
    rng = np.random.default_rng(args.seed)
    prompts = rng.integers(FIRST_TOKEN_ID, engine.config.vocab_size, (args.batch, PROMPT_TOKENS)).tolist()
    run(engine, prompts, 8)
    plain = run(engine, prompts, args.num_tokens)
    cells = []
    for length in tqdm(args.lengths, desc="lengths", disable=None):
        for acceptance in args.acceptance:
            drafter = ControlledDrafter(plain["texts"], acceptance, engine.config.vocab_size, args.seed)
            engine.drafting = FixedDrafting(engine, drafter, length)
            result = run(engine, prompts, args.num_tokens)
            cells.append(cell_of(result, plain, engine=name, batch=args.batch, length=length, acceptance=acceptance))
        engine.drafting = NoDrafting()
    again = run(engine, prompts, args.num_tokens)
    for cell in cells:  # the middle of what came before and after
        cell["plain_step_ms"] = (plain["step_ms"] + again["step_ms"]) / 2
        cell["plain_tok_s"] = 2 / (1 / plain["tok_s"] + 1 / again["tok_s"])
        cell["speedup"] = cell["tok_s"] / cell["plain_tok_s"]
        cell["expected_tokens_per_step"] = expected_tokens(cell["acceptance"], cell["length"])
    return cells


def draft_model(engine: LLMEngine, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a real draft model on prompts of the tasks, greedy and at temperature 1."""
    tokenizer = tokenizer_of(args.engine)
    examples = make_examples("list_recall", 256, lambda text: len(tokenizer.encode(text)), args.batch, args.seed)
    prompts = [tokenizer.encode(example.prompt) for example in examples]
    config = SpeculativeConfig("draft_model", max(args.lengths), draft_engine=args.draft_engine)
    cells = []
    for temperature in (0.0, 1.0):
        run(engine, prompts, 8, temperature)
        plain = run(engine, prompts, args.num_tokens, temperature)
        for length in args.lengths:
            engine.drafting = FixedDrafting(engine, make_drafter(config, engine.manifest, engine.config), length)
            run(engine, prompts, 8, temperature)
            result = run(engine, prompts, args.num_tokens, temperature)
            engine.drafting = NoDrafting()
            names = {"engine": name, "draft_engine": args.draft_engine.name, "batch": args.batch, "length": length}
            cells.append(cell_of(result, plain, **names, temperature=temperature))
    return cells


def describe(manifest: Manifest) -> str:
    """Return what an engine is, in a few words."""
    model = manifest.model
    cut = f"cut {model.cut}" if model.has_cut else "no cut"
    parameters = f"{manifest.num_parameters / 1e6:.1f}M parameters"
    return f"{parameters}, {model.num_layers} layers, {cut}, {model.num_owners} owners of K,V, {manifest.dtype}"


def merge(cells: list[dict[str, Any]], new: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the cells, of two with the same keys the new one, in order of these."""
    return sorted(merge_rows(cells, new, keys), key=itemgetter(*keys))


Cells = list[dict[str, Any]]


def step_costs(cells: Cells) -> dict[int, float]:
    """Return for each draft length what a step costs, as a multiple of one without drafts; medians over acceptances."""
    lengths = sorted({cell["length"] for cell in cells})
    return {
        length: statistics.median(cell["step_ms"] / cell["plain_step_ms"] for cell in cells if cell["length"] == length)
        for length in lengths
    }


def predicted(cell: dict[str, Any], costs: dict[int, float]) -> float:
    """Return the speed-up that the formula's tokens and the measured cost of a step give."""
    return float(cell["expected_tokens_per_step"] / costs[cell["length"]])


def groups(cells: Cells) -> dict[tuple[str, int], Cells]:
    """Return the cells by engine and batch."""
    found: dict[tuple[str, int], Cells] = {}
    for cell in cells:
        found.setdefault((cell["engine"], cell["batch"]), []).append(cell)
    return found


def columns_of(costs: dict[int, float]) -> list[tuple]:
    """Return the columns of the controlled drafter's table."""
    return [
        ("γ", "length"), ("step cost", lambda cell: costs[cell["length"]], ".2f"), ("α", "acceptance", "g"),
        ("tokens/step expected", "expected_tokens_per_step", ".2f"), ("measured", "tokens_per_step", ".2f"),
        ("speed-up predicted", lambda cell: predicted(cell, costs), ".2f"), ("measured", "speedup", ".2f"),
    ]  # fmt: skip


MODELS = (
    ("engine", "engine"), ("drafted by", "draft_engine"), ("batch", "batch"), ("temperature", "temperature", "g"),
    ("γ", "length"), ("acceptance", lambda cell: cell["accepted"] / max(cell["drafted"], 1), ".0%"),
    ("tokens/step", "tokens_per_step", ".2f"),
    ("step ms (plain)", lambda cell: f"{cell['step_ms']:.2f} ({cell['plain_step_ms']:.2f})"),
    ("speed-up", "speedup", ".2f"),
)  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    parts = [
        "# Draft length and acceptance",
        f"{report['machine']}. A controlled drafter spoils right drafts with probability 1 − α and costs nothing. "
        "Expected tokens a step: (1 − α^(γ+1)) / (1 − α); predicted speed-up: these over the step's measured cost. "
        "Tokens and times are of greedy decoding after the prompts.",
    ]
    for (engine, batch), cells in groups(report["cells"]).items():
        plain = statistics.median(cell["plain_step_ms"] for cell in cells)
        parts += [
            f"## {engine}, batch {batch}",
            f"{report['engines'][engine]}. A step without drafts takes {plain:.1f} ms.",
        ]
        parts.append(columns_table(columns_of(step_costs(cells)), cells, "rrrrrrr"))
    if report["draft_models"]:
        parts += ["## Draft models", columns_table(MODELS, report["draft_models"], "llrrrrrrr")]
    return "\n\n".join([*parts, "Commands:", "\n".join(f"    {command}" for command in report["commands"])]) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw for each engine and batch tokens a step, the step's cost and the speed-up against the draft length."""
    found = groups(report["cells"])
    with panels(path, 12, 3.4 * len(found), 3, lines=len(found)) as axes:
        for index, ((engine, batch), cells) in enumerate(found.items()):
            costs = step_costs(cells)
            row = tokens, cost, speed = axes[3 * index : 3 * index + 3]
            for number, acceptance in enumerate(sorted({cell["acceptance"] for cell in cells})):
                some = [cell for cell in cells if cell["acceptance"] == acceptance]
                lengths, colour = [cell["length"] for cell in some], f"C{number}"
                tokens.plot(lengths, [cell["expected_tokens_per_step"] for cell in some], "--", color=colour)
                tokens.plot(
                    lengths, [cell["tokens_per_step"] for cell in some], "o", color=colour, label=f"α = {acceptance:g}"
                )
                speed.plot(lengths, [predicted(cell, costs) for cell in some], "--", color=colour)
                speed.plot(lengths, [cell["speedup"] for cell in some], "o", color=colour)
            cost.plot(list(costs), list(costs.values()), "o-", color="black")
            cost.set_ylim(0, None)
            speed.axhline(1, color="grey", linewidth=0.8)
            titles = ("tokens a step (dashed: formula)", "cost of a step, plain = 1", "speed-up (dashed: predicted)")
            for axis, title in zip(row, titles, strict=True):
                axis.set_title(f"{engine}, batch {batch}: {title}", fontsize=9)
                axis.set_xlabel("drafts γ")


def write_report(report: dict[str, Any], output: Path) -> None:
    """Write ``output``.json, .md and, where there is something to plot, .svg."""
    files.write_report(output, report, markdown(report))
    if report["cells"]:
        plot(report, output.with_suffix(".svg"))


PARSER = make_parser(
    __doc__, engine_place("engine", "engine directory, built with --max-draft-len of the longest length"),
    engine_place("--draft-engine", "draft with this one instead of the controlled drafter"),
    option("--batch", type=int, default=1, help="sequences at once (default 1)"),
    option("--lengths", type=int, nargs="+", default=list(range(1, 9)), help="drafts a step"),
    option("--acceptance", type=float, nargs="+", default=[0.5, 0.8, 0.95, 1.0]),
    option("--num-tokens", type=int, default=96, help="tokens of a sequence that are timed (default 96)"), seed(),
    output("OUTPUT.json, .md and .svg", "perf/results/speculation-sweep", as_json=False),
)  # fmt: skip


def main() -> None:
    """Measure, and write the results."""
    args = PARSER.parse_args()
    engine = LLMEngine(args.engine, kv_cache_gib=0.5, enable_prefix_cache=False)
    report = read_json(args.output.with_suffix(".json"), {"cells": [], "draft_models": [], "commands": []})
    name = args.engine.name
    if args.draft_engine is None:
        keys = ("engine", "batch", "length", "acceptance")
        report["cells"] = merge(report["cells"], controlled(engine, name, args), keys)
    else:
        keys = ("engine", "draft_engine", "batch", "temperature", "length")
        report["draft_models"] = merge(report["draft_models"], draft_model(engine, name, args), keys)
    report.setdefault("engines", {})[name] = describe(engine.manifest)
    report["machine"] = describe_threads()
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    report["commands"] = sorted({*report["commands"], command_line("perf.speculation.sweep", words)})
    write_report(report, args.output)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
