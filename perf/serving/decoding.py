"""Ways to decode behind Triton under perf_analyzer: plain, with drafts, leaving early, with ShadowKV.

    python -m perf.serving.decoding [--variant plain ngram ...] [--concurrency 1 4] [--output STEM]

Each way is served on the tiny SwiftKV student in bf16; gRPC streaming on `ensemble`, prompts of the task `quoting` of
--input-tokens tokens, each its own, --output-tokens tokens forced. Acceptance, early exits and bytes of the cache are
what Triton's metrics port says: rates over a level's requests, bytes the most that was seen. Writes OUTPUT.json, .md.
"""

import argparse
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.demo.run import STUDENT
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from kvforge.tasks.prompt import make_examples
from perf.harness.engines import ASSETS, cached_engine, tokenizer_of
from perf.harness.experiment import Experiment, Row, chosen, lengths, levels, output, work
from perf.serving.load.client import FORCED, ask_text
from perf.serving.load.level import LevelMeter

MAX_DRAFT_LEN = 6
SHADOWKV = "shadowkv:rank=64,sparse_budget=256,num_outlier_chunks=8"
ENGINES = {
    "drafts": BuildOptions(dtype="bfloat16", max_num_seqs=16, max_draft_len=MAX_DRAFT_LEN),
    "shadowkv": BuildOptions(dtype="bfloat16", max_num_seqs=16, kv_policy=SHADOWKV),
}
COUNTERS = {
    "drafted": "kvforge_draft_tokens_total", "accepted": "kvforge_accepted_draft_tokens_total",
    "early_exits": "kvforge_early_exits_total", "generated": "kvforge_generated_tokens_total",
    "selected": "kvforge_shadowkv_selected_chunks_total", "reused": "kvforge_shadowkv_reused_chunks_total",
}  # fmt: skip
USED_BYTES = "kvforge_kv_cache_used_bytes"
SAMPLE_S = 0.05


@dataclass(frozen=True)
class Variant:
    """One way to decode: a key of ``ENGINES``, and how it is served."""

    engine: str
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "plain": Variant("drafts"),
    "ngram": Variant("drafts", {"speculative": SpeculativeConfig("ngram", MAX_DRAFT_LEN)}),
    "early-exit drafts": Variant("drafts", {"speculative": SpeculativeConfig("early_exit", MAX_DRAFT_LEN)}),
    "early exit above 0.95": Variant("drafts", {"early_exit_threshold": 0.95}),
    "shadowkv": Variant("shadowkv"),
}


def engine_of(name: str, work: Path) -> Path:
    """Return one of ``ENGINES`` under ``work``, built if it cannot be loaded."""
    return cached_engine(work / f"decoding-{name}", ASSETS / STUDENT.folder, ENGINES[name])


def inputs_of(engine: Path, num: int, input_tokens: int, output_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return the inputs of ``num`` requests."""
    tokenizer = tokenizer_of(engine)
    examples = make_examples("quoting", input_tokens - 1, lambda text: len(tokenizer.encode(text, False)), num, seed)
    return [ask_text(example.prompt, output_tokens, **FORCED) for example in examples]


def metric(samples: dict[str, float], family: str, label: str = "") -> float:
    """Return the sum of a family, of its samples with ``label`` where that is given; 0 where the page has none yet."""
    return sum(value for name, value in samples.items() if name.split("{")[0] == family and label in name)


@contextmanager
def most_seen(metrics_url: str) -> Iterator[dict[str, float]]:
    """Watch the bytes in use while the block runs; the mapping is complete after it."""
    most = {"device": 0.0, "host": 0.0}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            samples = read_metrics(metrics_url)
            for memory in most:
                most[memory] = max(most[memory], metric(samples, USED_BYTES, f'memory="{memory}"'))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Serve one variant and run every level; one row each."""
    variant, rows = VARIANTS[name], []
    engine = engine_of(variant.engine, args.work)
    with TritonServer(engine, ServerOptions(kv_cache_gib=args.kv_cache_gib, **variant.options)) as server:

        def inputs(num: int, seed: int) -> list[dict[str, Any]]:
            return inputs_of(engine, num, args.input_tokens, args.output_tokens, seed)

        meter = LevelMeter(server, "ensemble", inputs, args)
        for seed, level in enumerate(tqdm(args.concurrency, desc=name, unit="level", disable=None)):
            num = max(args.min_requests, 3 * level)
            before = settled(server.metrics_url)
            with most_seen(server.metrics_url) as most:
                numbers = meter.measure(["--concurrency-range", str(level)], num, seed)
            after = settled(server.metrics_url)
            counts = {key: metric(after, family) - metric(before, family) for key, family in COUNTERS.items()}
            rows.append({"variant": name, "concurrency": level, **counts, "most_bytes": most, **numbers})
    return rows


def settled(metrics_url: str) -> dict[str, float]:
    """Return the metrics once the counters, which follow within a second, have caught up."""
    threading.Event().wait(1.5)
    return read_metrics(metrics_url)


def of(part: str, whole: str) -> Callable[[Row], str]:
    """Return the value of a column that is a share, where there is any."""
    return lambda row: f"{row[part] / row[whole]:.0%}" if row.get(whole) and row[part] else "-"


def accepted(row: Row) -> str:
    """The share of drafts that were accepted."""
    return f"{row['accepted'] / row['drafted']:.0%} of {row['drafted']:.0f}" if row["drafted"] else "-"


EXPERIMENT = Experiment(
    "perf.serving.decoding", __doc__,
    options=(
        chosen("--variant", list(VARIANTS)), work(), levels([1, 4], min_requests=12, kv_cache_gib=0.5, waves=False),
        lengths(1500, 64), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=lambda args: [row for name in args.variant for row in measure(name, args)],
    settings=("input_tokens", "output_tokens"),
    notes=f"Tiny SwiftKV student, bf16, {{input_tokens}} tokens in, {{output_tokens}} out; shadowkv is `{SHADOWKV}`. "
    "Bytes: the most in use at a time.",
    columns=(
        ("way to decode", "variant"), ("concurrency", "concurrency"),
        ("TTFT p50, ms", lambda row: 1e3 * row["ttft_s"]["p50"], ".1f"),
        ("TPOT p50, ms", lambda row: 1e3 * row["tpot_s"]["p50"], ".2f"), ("output tok/s", "output_tok_s", ".0f"),
        ("drafts accepted", accepted), ("tokens that left early", of("early_exits", "generated")),
        (
            "selected chunks in place",
            lambda row: f"{row['reused'] / row['selected']:.0%}" if row.get("selected") else "-",
        ),
        ("cache on the device, MB", lambda row: row["most_bytes"]["device"] / 1e6, ".2f"),
        ("on the host, MB", lambda row: row["most_bytes"]["host"] / 1e6, ".2f"), ("failed", "num_incomplete"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
