"""What KV policies cost a real model: divergence from the full cache over the budget, and retrieval from long prompts.

    python -m perf.real_model.policies CHECKPOINT TEXTS [--work DIR] [--policy snapkv] [--budget 128] [--length 2048]
        [--output perf/results/NAME] [--append] [--minutes 20]

TEXTS has a text file for each kind, such as the ``held-out`` of ``perf.real_model.texts``. Of each document the first
``--length`` tokens are the prompt, computed at once; the text's next ``--forced`` tokens follow, each in a decode step
of its own. KL(full cache || policy), in nats a token, and the share of equal best tokens are those of all of these
tokens but the first, which the prompt's own step predicts; 95% intervals over documents. Retrieval: the task
``needle_single``, exact matches, under the full cache and each policy's largest budget. Engines under --work are built
once. OUTPUT.jsonl has a line a cell, which a later run with --append leaves out. Writes OUTPUT.json, .md and .svg.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvforge.compiler import BuildOptions
from kvforge.evaluation.bootstrap import bootstrap_interval
from kvforge.evaluation.compare import kl_divergence
from kvforge.evaluation.documents import text_documents
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.score import MAX_ANSWER_TOKENS, is_correct, wilson
from kvforge.manifest import TOKENIZER_DIR
from kvforge.runtime import LLMEngine
from kvforge.tasks.prompt import Example
from perf.harness.engines import tokenizer_of
from perf.harness.experiment import (
    RESUME,
    Experiment,
    Report,
    Row,
    columns_table,
    interval,
    number,
    numbers,
    option,
    output,
    place,
    told,
    work,
)
from perf.harness.files import read_lines, run_cells
from perf.harness.forced import forced_logits
from perf.harness.plots import panels
from perf.harness.policy_engines import FULL, NAMES, Cell, Engines, cells_of
from perf.quality.answers import examples_of
from perf.real_model.closeness import texts_of

TASK, SEED = "needle_single", 1
SETTINGS = ("length", "forced", "num_documents", "retrieval_length", "num_prompts")
"""Cells of other ones are not taken over from an earlier run."""


def decode_logits(engine: LLMEngine, documents: Sequence[list[int]], num_prompt: int) -> np.ndarray:
    """Return the logits of the tokens that decode steps predict, ``[documents, forced - 1, vocab]`` float32."""
    num_decoded = len(documents[0]) - num_prompt - 1
    found = np.zeros((len(documents), num_decoded, engine.manifest.vocab_size), np.float32)
    for index, at, logits in forced_logits(engine, documents, num_prompt):
        if at > num_prompt:
            found[index, at - num_prompt - 1] = logits
    return found


def divergence(full: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """Return KL(full || other) and the share of equal best tokens of logits ``[documents, tokens, vocab]``, each with
    its interval, and how many tokens there are."""
    kl, same = [], []
    for expected, found in zip(torch.from_numpy(full), torch.from_numpy(other), strict=True):
        kl.append(float(kl_divergence(expected, found).sum()))
        same.append(int((expected.argmax(-1) == found.argmax(-1)).sum()))
    counts = [full.shape[1]] * len(full)
    return {
        "kl": asdict(bootstrap_interval(kl, counts)),
        "agreement": asdict(bootstrap_interval(same, counts)),
        "num_tokens": sum(counts),
    }


def retrieval(generator: EngineGenerator, length: int, examples: Sequence[Example]) -> dict[str, Any]:
    """Return how many prompts of a length are answered exactly, with the share's Wilson interval."""
    given = generator([example.prompt for example in examples])
    right = sum(is_correct(example, text) for example, text in zip(examples, given, strict=True))
    low, high = wilson(right, len(examples))
    return {"length": length, "num_prompts": len(examples), "num_correct": right, "low": low, "high": high}


class Measurement:
    """Measures cells of one checkpoint, the full cache's logits at hand."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.longest = max(args.length + args.forced - MAX_ANSWER_TOKENS, *args.retrieval_length)
        options = BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=self.longest + MAX_ANSWER_TOKENS)
        self.engines = Engines(args.checkpoint, options, args.work)
        full = self.engines.of(Cell(FULL))
        of_text = (tokenizer_of(full), args.num_documents, args.length + args.forced)
        self.documents = [piece for file in texts_of(args.texts) for piece in text_documents(file, *of_text)]
        tokenizer = full / TOKENIZER_DIR / "tokenizer.json"
        self.examples = {
            length: examples_of((TASK,), tokenizer, length, args.num_prompts, SEED)[TASK]
            for length in args.retrieval_length
        }
        self.expected: np.ndarray | None = None

    def row(self, cell: Cell) -> dict[str, Any]:
        """Return what is found of a cell; the full cache is beside itself."""
        generator = self._open(cell)
        if self.expected is None:
            self.expected = self._decode(generator if cell == Cell(FULL) else self._open(Cell(FULL)))
        found = divergence(self.expected, self.expected if cell == Cell(FULL) else self._decode(generator))
        asked = self.examples if cell.budget in (None, max(self.args.budget)) else {}
        return {**cell._asdict(), **found, "retrieval": [retrieval(generator, *one) for one in asked.items()]}

    def _open(self, cell: Cell) -> EngineGenerator:
        return EngineGenerator(self.engines.of(cell), self.longest, show_progress=False)

    def _decode(self, generator: EngineGenerator) -> np.ndarray:
        engine = generator.llm.engine
        assert isinstance(engine, LLMEngine)  # of target cpu
        return decode_logits(engine, self.documents, self.args.length)


def make_report(args: argparse.Namespace) -> Report:
    """Measure the cells that no earlier run has; the report is of all that were asked for."""
    cells = cells_of(args.policy or NAMES, args.budget)
    settings = {name: getattr(args, name) for name in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        lines = args.output.with_suffix(".jsonl") if args.output else Path(folder) / "cells.jsonl"
        if not args.append:
            lines.unlink(missing_ok=True)
        measurement = Measurement(args)
        known = {Cell(row["name"], row["budget"]) for row in read_lines(lines) if row["settings"] == settings}
        left = [cell for cell in cells if cell not in known]
        run_cells(left, lambda cell: [{**measurement.row(cell), "settings": settings}], lines, args.minutes, "cell")
        own = [row for row in read_lines(lines) if row.pop("settings") == settings]
        rows = [row for row in own if Cell(row["name"], row["budget"]) in cells]
    return {"kinds": [file.stem for file in texts_of(args.texts)], "rows": rows}


def check(args: argparse.Namespace) -> str | None:
    """Say what cannot be asked for."""
    return None if args.forced > 1 else "--forced must be at least 2: the first token is the prompt's own step's"


def by_policy(rows: list[Row]) -> dict[str, dict[int, Row]]:
    """Return the rows of every policy by budget, the policy first that is closest at its largest budget."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["budget"] is not None:
            found.setdefault(row["name"], {})[row["budget"]] = row
    return dict(sorted(found.items(), key=lambda item: item[1][max(item[1])]["kl"]["value"]))


def columns(report: Report) -> list[tuple]:
    """Return the columns of rows by policy, each of its own rows by budget; the full cache has budget 0."""
    budgets = sorted({row["budget"] for row in report["rows"]} - {None})
    lengths = sorted({one["length"] for row in report["rows"] for one in row["retrieval"]})

    def estimate(own: Row, budget: int, key: str, digits: int, factor: float = 1) -> str:
        return interval(own[budget][key], digits, factor) if budget in own else ""

    def retrieved(own: Row, length: int) -> str:
        found = [one for one in own[max(own, key=int)]["retrieval"] if one["length"] == length]
        return f"{found[0]['num_correct']} of {found[0]['num_prompts']}" if found else ""

    return [
        ("policy", lambda own: next(iter(own.values()))["name"]),
        *((f"KL, {n}", lambda own, n=n: estimate(own, n, "kl", 3)) for n in budgets),
        *((f"same best token, {n}", lambda own, n=n: estimate(own, n, "agreement", 1, 100)) for n in budgets),
        *((f"retrieval, {n}", lambda own, n=n: retrieved(own, n)) for n in lengths),
    ]  # fmt: skip


def markdown(report: Report) -> str:
    """Return the table with its explanation."""
    full = [{0: row} for row in report["rows"] if row["budget"] is None] or [{0: {"name": "full", "retrieval": []}}]
    made = columns(report)
    notes = (
        f"Prompts of {report['length']} tokens, {report['num_documents']} of each kind ({', '.join(report['kinds'])}); "
        f"decode steps of the next {report['forced'] - 1} tokens beside those of the full cache. 95% intervals over "
        "documents. Retrieval: right answers under the largest budget, by tokens of the prompt."
    )
    table = columns_table(made, [*full, *by_policy(report["rows"]).values()], "l" + "r" * (len(made) - 1))
    return f"{told(report)}\n\n{notes}\n\n{table}\n"


def plot(report: Report, path: Path) -> None:
    """KL of each policy with its interval, a mark for each budget, on a logarithmic scale."""
    found = by_policy(report["rows"])
    names = list(found)
    with panels(path, 7.5, 1 + 0.3 * len(found)) as (axes,):
        for budget in sorted({budget for own in found.values() for budget in own}):
            kept = [(names.index(name), own[budget]["kl"]) for name, own in found.items() if budget in own]
            values = [kl["value"] for _, kl in kept]
            bars = [[kl["value"] - kl["low"] for _, kl in kept], [kl["high"] - kl["value"] for _, kl in kept]]
            style = {"fmt": "o", "markersize": 4, "capsize": 2, "label": f"budget {budget}"}
            axes.errorbar(values, [place for place, _ in kept], xerr=bars, **style)
        label = "KL(full cache ‖ policy), nats a token"
        axes.set(xscale="log", xlabel=label, yticks=range(len(names)), yticklabels=names)
        axes.invert_yaxis()


EXPERIMENT = Experiment(
    "perf.real_model.policies", __doc__,
    options=(
        place("checkpoint"), place("texts"), option("--policy", nargs="+", choices=NAMES, help="default: all"),
        numbers("--budget", [128, 512], "(default 128 512)"),
        number("--length", 2048, "tokens of a prompt (default %(default)s)"),
        number("--forced", 33, "tokens after it (default %(default)s)"),
        number("--num-documents", 2, "of a kind (default %(default)s)"),
        numbers("--retrieval-length", [1024, 4096], metavar="LENGTH"),
        number("--num-prompts", 8, "of retrieval, a length (default %(default)s)"), work(),
        output("OUTPUT.json, .md and .svg"), RESUME,
    ),
    measure=make_report, settings=SETTINGS, is_dated=True, shown=markdown, plot=plot, check=check,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
