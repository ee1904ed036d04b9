"""Speed of self-drafts where every draft is right, on a model whose graphs take the time: the bound for its size.

    python -m perf.speculation.self_draft_bound [--work DIR] [--output STEM]

The 213M shape with a cut at 8 of 16 and random weights, of which the upper layers' outputs are zero and the early
exit's head is the LM head: both heads say the same, so all drafts are accepted, and every graph costs what it costs.
L drafts should take (L + 1) times ``lower`` and the exit, and ``upper`` once. Writes OUTPUT.json and .md.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from kvforge.compiler import BuildOptions
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Row, number, numbers, output, work
from perf.harness.random_checkpoint import LLAMA_213M, write_checkpoint
from perf.speculation.early_exit import DRAFTS, measure

CUT, GROUP, LENGTHS = 8, 4, (0, 1, 2, 4, 6)
NOTHING_ADDED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def engine_of(work: Path) -> Path:
    """Return the engine under ``work``, built if it cannot be loaded (about two minutes)."""
    checkpoint, engine = work / "checkpoint-agreeing-exit", work / "engine-agreeing-exit"

    def make_checkpoint() -> Path:
        write_checkpoint(checkpoint, LLAMA_213M | {"early_exit": True}, CUT, GROUP)
        weights = load_file(checkpoint / "model.safetensors")
        for layer in range(CUT, LLAMA_213M["num_hidden_layers"]):
            for name in NOTHING_ADDED:
                weights[f"model.layers.{layer}.{name}"].zero_()
        weights["lm_head_early_exit.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, checkpoint / "model.safetensors")
        return checkpoint

    options = BuildOptions(dtype="bfloat16", max_num_seqs=8, max_seq_len=1024, max_draft_len=max(LENGTHS))
    return cached_engine(engine, make_checkpoint, options)


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Measure every batch."""
    engine, settings = engine_of(args.work), [{"length": length, "confidence": 0.0} for length in LENGTHS]
    for batch in args.batch:
        prompts = np.random.default_rng(0).integers(3, LLAMA_213M["vocab_size"], (batch, 128)).tolist()
        yield from measure(engine, prompts, 0.0, batch, settings, args.repeats)


EXPERIMENT = Experiment(
    "perf.speculation.self_draft_bound", __doc__,
    options=(work(), numbers("--batch", [1, 4]), number("--repeats", 5), output("OUTPUT.json and OUTPUT.md")),
    measure=run, notes=f"213M parameters, cut {CUT} of 16, bf16, an exit that agrees with the model.",
    columns=DRAFTS[1:],
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
