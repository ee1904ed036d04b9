"""Everything in one engine beside each part alone: SwiftKV with AcrossKV, an fp8 cache, a rule of eviction.

    python -m perf.eviction.composition [--rule snapkv:budget=512] --output perf/results/composition

Memory and speed: the 213M-parameter model, 24 requests of 2048 → 128 tokens, all there from the start and forced to
their full length, in a pool of 96 MiB. Bytes are those of a sequence at its end over all owners, its state included.
Answers: the tiny models at 2048 tokens, greedy, paired by prompt with those of the plain engine; the cut's is the
student's, with 2-way AcrossKV. Everything under --work is kept. Writes OUTPUT.json and .md.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.manifest import load_manifest
from perf.eviction.batch_max import LOAD, SERVED, pooled, prompts_of, serve
from perf.eviction.engines import PolicyEngine, prepare
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.experiment import Experiment, Report, lengths, number, option, output, work
from perf.harness.rounds import medians
from perf.peers.systems import WORK, Variant
from perf.quality.answers import Questions, examples_of
from perf.quality.scores import TASKS, Cell, accuracy, difference, percent, points

TOKENS = 2048 - MAX_ANSWER_TOKENS
"""Of the tiny models' prompts."""


@dataclass(frozen=True)
class Parts:
    """What of the three an engine has."""

    has_cut: bool = False
    is_fp8: bool = False
    evicts: bool = False

    @property
    def label(self) -> str:
        names = {"SwiftKV, 2-way AcrossKV": self.has_cut, "fp8 cache": self.is_fp8, "eviction": self.evicts}
        return " + ".join(name for name, has in names.items() if has) or "none"

    @property
    def kv_dtype(self) -> str:
        return "fp8" if self.is_fp8 else "bfloat16"


ROWS = (Parts(), Parts(has_cut=True), Parts(is_fp8=True), Parts(evicts=True), Parts(True, True, True))


def measure_speed(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """Return bytes, sequences and tokens per second of the 213M-parameter model."""
    policy = args.rule if parts.evicts else "full"
    variant = Variant(8, 2, kv_dtype=parts.kv_dtype) if parts.has_cut else Variant(kv_dtype=parts.kv_dtype)
    path = prepare(args.work, PolicyEngine(policy, variant), args.input_tokens + args.output_tokens)
    manifest, (fits, engine) = load_manifest(path), pooled(path, args)
    lengths = args.input_tokens, args.output_tokens
    return {
        "bytes_per_token": manifest.kv_bytes_per_token,
        "sequence_bytes": manifest.model.num_owners * manifest.policy.device_bytes(manifest.owner_cache, *lengths),
        "planned": fits,
        **serve(engine, prompts_of(manifest, args), args.output_tokens, args.requests),
    }


def ask(parts: Parts, questions: Questions, args: argparse.Namespace) -> Cell:
    """Return the answers of a tiny model."""
    slug = parts.label.replace(", ", "-").replace(" + ", "-").replace(" ", "-")
    options = BuildOptions(
        dtype="bfloat16", max_num_seqs=16, max_seq_len=TOKENS + MAX_ANSWER_TOKENS, kv_dtype=parts.kv_dtype,
        kv_policy=args.rule if parts.evicts else "full",
    )  # fmt: skip
    rule = args.rule.replace(":", "-").replace(",", "-").replace("=", "") if parts.evicts else "full"
    engine = args.work / f"composition-{slug}-{rule}"
    return questions.ask(cached_engine(engine, STUDENT_DIR if parts.has_cut else TEACHER_DIR, options))


def measure(args: argparse.Namespace) -> Report:
    """Take turns over the rows for speed, then ask each."""
    runs: dict[str, list[dict[str, Any]]] = {parts.label: [] for parts in ROWS}
    for _ in range(args.turns):
        for parts in tqdm(ROWS, desc="speed", unit="engine", disable=None):
            runs[parts.label].append(measure_speed(parts, args))
    examples = examples_of(TASKS, TEACHER_DIR / "tokenizer.json", TOKENS, args.num_prompts, 1)
    questions = Questions(examples, TOKENS, 1, args.work)
    cells = {parts.label: ask(parts, questions, args) for parts in tqdm(ROWS, desc="answers", unit="engine")}
    plain = cells[ROWS[0].label]
    rows = {
        label: medians(found)
        | {"accuracy": accuracy(cells[label]), "versus_none": difference(plain, cells[label]), "runs": found}
        for label, found in runs.items()
    }
    return {"load": {name: getattr(args, name) for name in LOAD}, "rule": args.rule, "rows": rows}


def notes(report: Report) -> str:
    """What the parts were measured with."""
    load, num_prompts = report["load"], next(iter(report["rows"].values()))["accuracy"]["num_prompts"]
    return (
        f"{load['requests']} requests of {load['input_tokens']} → {load['output_tokens']} tokens on the 213M model in "
        f"{load['pool_mib']} MiB; eviction is `{report['rule']}`. `at once`: the most sequences that ran, and how many "
        f"fit while all are at their largest. Answers: tiny models, {num_prompts} prompts of {TOKENS} tokens, exact "
        "match with its 95% Wilson interval, difference paired by prompt."
    )


EXPERIMENT = Experiment(
    "perf.eviction.composition", __doc__,
    options=(
        lengths(2048, 128),
        option("--rule", default="snapkv:budget=512", help="as --kv-policy takes it (default %(default)s)"),
        number("--requests", 24), number("--pool-mib", 96),
        number("--num-prompts", 40, "of each task (default %(default)s)"), number("--turns", 1), work(WORK),
        output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, title="Parts alone and together", notes=notes,
    columns=(
        ("parts", "name"), ("bytes of a cached token", "bytes_per_token"),
        ("MiB of a sequence", "sequence_bytes", ".2f", 2**-20), ("at once", SERVED[0][1]), SERVED[1],
        ("decode tok/s", "decode_tok_s", ".0f"), ("output tok/s", "output_tok_s", ".0f"),
        ("exact match, %", lambda row: percent(row["accuracy"])),
        ("versus none, points", lambda row: "" if row["name"] == ROWS[0].label else points(row["versus_none"])),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
