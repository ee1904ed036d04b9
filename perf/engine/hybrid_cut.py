"""Time to the first token of a hybrid with a cut, whose prompts only update states above it, beside it without one.

    python -m perf.engine.hybrid_cut --output perf/results/hybrid-cut

The model has the first --layers layers of --model, random weights, --num-experts of its experts where it has some, and
a vocabulary of --vocab-size. Engines without a cut and with one at half of the layers take turns, one request at a
time. FLOPs are those that the planner counts of a prompt. Rows of other models stay in the report.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from kvforge.compiler import BuildOptions
from kvforge.costs.flops import prompt_flops
from kvforge.runtime.engine import LLMEngine
from model_defs import load_config
from perf.harness.batch import Batch
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Row, lengths, number, option, output, work
from perf.harness.published_shapes import first_layers
from perf.harness.random_checkpoint import cached_checkpoint, with_cut
from perf.harness.rounds import turned
from perf.harness.tables import spread

NO_CUT, CUT = "no cut", "cut at half"
HYBRIDS = ("Qwen3-Next-80B-A3B", "LFM2-1.2B", "Granite-4.0-H-Tiny", "Kimi-Linear-48B-A3B")


def measure(args: argparse.Namespace) -> list[Row]:
    """Serve one prompt after the other in both engines."""
    hf = first_layers(args.model, args.layers)
    few = {"num_experts": args.num_experts, "num_local_experts": args.num_experts, "vocab_size": args.vocab_size}
    hf |= {name: few[name] for name in hf.keys() & few.keys()}
    limits = {"max_num_seqs": 4, "max_num_tokens": 2048, "max_seq_len": args.input_tokens + args.output_tokens}
    options, engines, flops = BuildOptions(dtype="bfloat16", **limits), {}, {}
    for name, cut in ((NO_CUT, None), (CUT, args.layers // 2)):
        config = with_cut(hf, cut)
        folder = args.work / f"hybrid-{args.model}-{args.layers}-{args.num_experts}-{args.vocab_size}-{cut}"
        checkpoint = cached_checkpoint(folder / "checkpoint", config)
        at = cached_engine(folder / f"{limits['max_seq_len']}", lambda source=checkpoint: source, options)
        engines[name] = LLMEngine(at, enable_prefix_cache=False, kv_cache_gib=0.25)
        flops[name] = prompt_flops(load_config(config), args.input_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    cpu: dict[str, list[float]] = {name: [] for name in engines}
    prompts = np.random.default_rng(0).integers(3, args.vocab_size, (args.rounds + 1, args.input_tokens)).tolist()
    for index, prompt in enumerate(prompts):
        for name in turned(list(engines), index):
            running = Batch(engines[name], [prompt], args.output_tokens)
            began = time.process_time()
            first = running.start()
            if index > 0:  # the first touches every page of the weights
                seconds[name].append(round(first, 4))
                cpu[name].append(round(time.process_time() - began, 4))
            running.finish()
    return [
        {
            "model": args.model, "engine": name, "threads": torch.get_num_threads(), "ttft_s": seconds[name],
            "cpu_s": cpu[name], "flops": flops[name], "ratio": _ratio(seconds, name),
            "ratio_of_cpu": _ratio(cpu, name), "ratio_of_flops": flops[name] / flops[NO_CUT],
        }
        for name in engines
    ]  # fmt: skip


def _ratio(found: dict[str, list[float]], name: str) -> float:
    return round(statistics.median(own / full for own, full in zip(found[name], found[NO_CUT], strict=True)), 4)


EXPERIMENT = Experiment(
    "perf.engine.hybrid_cut", __doc__,
    options=(
        work(), option("--model", choices=HYBRIDS, default=HYBRIDS[0]), number("--layers", 8),
        number("--num-experts", 16), number("--vocab-size", 32768),
        lengths(1024, 4), number("--rounds", 5), output("OUTPUT.json and .md"),
    ),
    measure=measure, settings=("layers", "num_experts", "vocab_size", "input_tokens"), merged=("model", "engine"),
    title="Hybrids with a cut",
    notes="{layers} layers (where there are experts, {num_experts}), random weights in bf16, a vocabulary of "
    "{vocab_size}, prompts of {input_tokens} tokens, by turns; ratios to the engine without a cut are medians of the "
    "rounds.",
    columns=(
        ("model", "model"), ("engine", "engine"), ("threads", "threads"),
        ("time to first token, s", lambda row: spread(row["ttft_s"], 2)), ("ratio", "ratio", ".2f"),
        ("CPU time of it, s", lambda row: spread(row["cpu_s"], 2)), ("ratio", "ratio_of_cpu", ".2f"),
        ("TFLOP", "flops", ".2f", 1e-12), ("ratio", "ratio_of_flops", ".2f"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
