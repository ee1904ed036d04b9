"""How far a rewired model is from its source before any distillation, for every cut and way to initialise it.

    python -m perf.quality.rewire_divergence model_defs/assets/tiny-teacher -o perf/results/rewire-tiny-teacher.json

Mean KL(source, rewired) in nats per token and the share of tokens with the same argmax, on generated text that the
calibration has not seen, in float32. Reproducible; nothing is random but the weights it is given.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvforge.checkpoint.model import open_model
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from kvforge.tokenization.calibration import calibration_samples
from model_defs import load_config
from perf.harness.command import make_parser, run_main
from perf.harness.files import write_json
from perf.harness.options import option, place

TEST_SAMPLES, TEST_TOKENS = 24, 512
ASKED = ("cut", "group_size", "init", "ridge", "num_samples")
INITS = ("copy", "mean", "fold", "ridge")
"""Of any group size; minicache, of pairs alone, is in ``perf.quality.minicache``."""


def rows(num_layers: int) -> list[RewireOptions]:
    """Every cut with every init; half the layers also with groups, with other regularisers and little text."""
    half = num_layers // 2
    every = [RewireOptions(cut=cut, init=init) for cut in range(1, num_layers) for init in INITS]
    grouped = [RewireOptions(cut=half, group_size=size, init=init) for size in (2, 4) for init in INITS]
    regularised = [
        RewireOptions(cut=half, init="ridge", ridge=ridge, num_samples=samples)
        for samples in (64, 5)
        for ridge in (1e-1, 1e-2, 1e-3, 1e-4)
    ]
    return every + grouped + regularised


def load(path: Path) -> SwiftKVForCausalLM:
    """Return the model of a checkpoint in float32."""
    checkpoint = open_model(path)
    return load_model(checkpoint, load_config(checkpoint.hf_config), torch.float32)


@torch.inference_mode()
def measure(source: Path, options: RewireOptions, samples: list[list[int]]) -> dict[str, Any]:
    """Rewire to a temporary directory and compare with the source."""
    with tempfile.TemporaryDirectory() as folder:
        summary = rewire_checkpoint(source, Path(folder) / "out", options)
        student = load(Path(folder) / "out")
    teacher, divergence, same, count = load(source), 0.0, 0, 0
    for ids in samples:
        expected = teacher(torch.tensor([ids])).double().log_softmax(-1)
        found = student(torch.tensor([ids])).double().log_softmax(-1)
        divergence += float((expected.exp() * (expected - found)).sum())
        same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        count += len(ids)
    residuals = [share for owner in summary.owners for share in (owner.k, owner.v)]
    asked = dataclasses.asdict(options)
    found = {"kl": divergence / count, "agreement": same / count, "num_tokens": count}
    return {name: asked[name] for name in ASKED} | found | {"worst_residual": max(residuals, default=None)}


def main() -> None:
    """Parse the command line, measure every row, write JSON."""
    args = make_parser(__doc__, place("source"), option("-o", "--output", type=Path, required=True)).parse_args()
    config = load_config(open_model(args.source).hf_config)
    seen = RewireOptions(cut=1).num_samples
    samples = calibration_samples(args.source, config.vocab_size, None, seen + TEST_SAMPLES, TEST_TOKENS)[seen:]
    results = [measure(args.source, options, samples) for options in tqdm(rows(config.num_layers))]
    write_json(args.output, {"source": args.source.name, "rows": results})


if __name__ == "__main__":
    raise SystemExit(run_main(main))
