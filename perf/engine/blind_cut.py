"""Decode steps behind long prompts: a cut whose upper layers see no prompt, beside cuts with a single input.

    python -m perf.engine.blind_cut [--shape 213M] --output perf/results/blind-cut

Engines of a shape, random weights, cut at half of its layers, take turns step by step. Pools have the pages of the
requests and no more, and the plan is what the planner counts of these. Bytes read are those that it counts of the cache
in a step in the middle of the output. ``8B/8`` is an eighth of Llama-3.1-8B's shape in all that a decode step reads: 4
of its 32 layers and of its vocabulary an eighth, with int8 weights.

With ``--same-prompt`` all requests of a batch have one prompt, computed once, of which each gets a copy in pages of its
own before decode steps: these read as many bytes as with different prompts, from as many places but for the anchors'.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvforge.compiler import BuildOptions
from kvforge.costs.cache import kv_bytes_above, kv_bytes_below, kv_read_bytes
from kvforge.kv_policies.visibility import visibility_of
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.sessions.pools import device_bytes
from model_defs import ModelConfig, load_config
from perf.harness.batch import Batch
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, Row, chosen, flag, lengths, numbers, option, output, ratio, work
from perf.harness.random_checkpoint import LLAMA_8B, LLAMA_213M, cached_checkpoint, with_cut

SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "213M": ({**LLAMA_213M, "max_position_embeddings": 32768 + 1024}, "bfloat16"),
    "8B/8": ({**LLAMA_8B, "num_hidden_layers": 4, "vocab_size": LLAMA_8B["vocab_size"] // 8}, "int8"),
}
"""With the format of their weights."""
ANCHORS = {"cut_kind": "blind", "num_anchor_tokens": 32}
SINGLE, OTHERS = "single input", ("single input, one owner", "blind")


def models(shape: str, others: Sequence[str] = OTHERS) -> dict[str, dict[str, Any]]:
    """Return the configs of a shape's cuts, by name: a single input's, then ``others``."""
    config, layers = SHAPES[shape][0], SHAPES[shape][0]["num_hidden_layers"]
    cut = layers // 2
    made = {SINGLE: with_cut(config, cut), OTHERS[0]: with_cut(config, cut, layers - cut)}
    made[OTHERS[1]] = made[SINGLE] | ANCHORS
    return {name: made[name] for name in (SINGLE, *others)}


def kept(model: ModelConfig, args: argparse.Namespace) -> tuple[int, int]:
    """Return the tokens of a request that lower and upper owners keep; the last token's K and V are never written."""
    length, visibility = args.input_tokens + args.output_tokens - 1, visibility_of(model)
    return length, length if visibility is None else visibility.num_seen(args.input_tokens, length)


def load(name: str, batch: int, args: argparse.Namespace) -> LLMEngine:
    """Load an engine with the pages of ``batch`` requests."""
    length = args.input_tokens + args.output_tokens
    limits = {"max_num_seqs": max(args.batch), "max_num_tokens": 512, "max_seq_len": length}
    options = BuildOptions(dtype="bfloat16", weight_dtype=SHAPES[args.shape][1], calibration="none", **limits)
    folder, hf = args.work / "blind-cut" / args.shape.replace("/", "-") / name, models(args.shape)[name]
    at = folder / f"{limits['max_num_seqs']}-{length}"
    engine_dir = cached_engine(at, lambda: cached_checkpoint(folder / "checkpoint", hf), options)
    below, above = (batch * -(-count // options.page_size) for count in kept(load_config(hf), args))
    return LLMEngine(
        engine_dir,
        enable_prefix_cache=args.same_prompt,
        max_num_seqs=batch,
        num_pages=below,
        num_upper_pages=above if load_config(hf).is_blind else None,
    )


def separate(engine: LLMEngine) -> None:
    """Give each running request a copy of every page that it shares. Anchors stay shared."""
    scheduler, model = engine.scheduler, engine.manifest.model
    above = model.owners_above if model.is_blind else ()
    below = [pool for owner, pool in zip(model.owners, engine.runner.pools, strict=True) if owner not in above]
    for sequence in scheduler.running:
        for index, shared in enumerate(sequence.pages):
            if scheduler.pool.ref_counts[shared] == 1 or shared in scheduler.upper_pages.above:
                continue
            own = scheduler.pool.allocate()
            assert own is not None, "the pool has the pages of all requests"
            for tensor in (tensor for pool in below for tensor in pool):
                tensor[own] = tensor[shared]
            scheduler.let_go([shared])
            sequence.pages[index] = scheduler.slots.page_table[sequence.slot, index] = own


def planned_bytes(engine: LLMEngine, args: argparse.Namespace) -> int:
    """Return the bytes of a request of the engine's as the planner counts them, all pages filled."""
    model, kv_dtype, page = engine.manifest.model, engine.manifest.kv_dtype, engine.config.page_size
    below, above = (-(-count // page) * page for count in kept(model, args))
    return below * kv_bytes_below(model, kv_dtype) + above * kv_bytes_above(model, kv_dtype)


def measure_batch(batch: int, args: argparse.Namespace) -> list[Row]:
    """Serve ``batch`` prompts in every engine, and let them take turns at decode steps."""
    engines = {name: load(name, batch, args) for name in models(args.shape, args.beside)}
    vocab = SHAPES[args.shape][0]["vocab_size"]
    prompts = np.random.default_rng(batch).integers(3, vocab, (batch, args.input_tokens)).tolist()
    if args.same_prompt:
        prompts = prompts[:1] * batch
    running: dict[str, Batch] = {}
    for name, engine in engines.items():
        running[name] = Batch(engine, prompts, args.output_tokens)
        running[name].start()
        separate(engine)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(args.output_tokens - 2):
        for name in sorted(engines, reverse=bool(index % 2)):
            begin = time.perf_counter()
            running[name].step()
            seconds[name].append(time.perf_counter() - begin)
    middle, rows = args.input_tokens + args.output_tokens / 2, []
    for name, engine in engines.items():
        manifest = engine.manifest
        read = batch * kv_read_bytes(manifest.model, manifest.kv_dtype, middle, args.input_tokens)
        rows.append(
            {
                "model": name,
                "batch": batch,
                "step_s": statistics.median(seconds[name][2:]),
                "allocated_bytes": device_bytes(manifest, engine.runner.pools),
                "planned_bytes": batch * planned_bytes(engine, args),
                "cache_read_bytes": read,
            }
        )
    return rows


def measure(args: argparse.Namespace) -> Report:
    """Run every batch."""
    rows = []
    for batch in args.batch:
        rows += measure_batch(batch, args)
        gc.collect()
    by_name = {(row["model"], row["batch"]): row for row in rows}
    for row in rows:
        reference = by_name[SINGLE, row["batch"]]
        row["of_single_input"] = row["step_s"] / reference["step_s"]
        row["reads_of_single_input"] = row["cache_read_bytes"] / reference["cache_read_bytes"]
    return {"rows": rows}


EXPERIMENT = Experiment(
    "perf.engine.blind_cut", __doc__,
    options=(
        option("--shape", choices=tuple(SHAPES), default="213M", help="(default %(default)s)"),
        numbers("--batch", [1]), lengths(8192, 48), work(), output("OUTPUT.json and .md"),
        flag("--same-prompt", "compute one prompt a batch, and copy its K and V"),
        chosen("--beside", OTHERS, "the cuts beside one with a single input (default: both)"),
    ),
    measure=measure, settings=("shape", "input_tokens", "output_tokens", "same_prompt"),
    title="A cut whose upper layers see no prompt",
    notes="Shape {shape}, random weights, cut at half of its layers, prompts of {input_tokens} tokens and "
    "{output_tokens} output tokens; blind with 32 anchors. Engines take turns step by step: beside other work on the "
    "machine ratios hold, and times do not.",
    columns=(
        ("cut", "model"), ("batch", "batch"), ("step ms", "step_s", ".1f", 1e3),
        ("of single input", "of_single_input", ".2f"), ("cache read MiB", "cache_read_bytes", ".1f", 1 / 2**20),
        ("of single input", "reads_of_single_input", ".2f"), ("allocated MiB", "allocated_bytes", ".2f", 1 / 2**20),
        ("of plan", ratio("allocated_bytes", "planned_bytes"), ".4f"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
