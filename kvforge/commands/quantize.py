"""``kvforge quantize``: calibrate a checkpoint with NVIDIA ModelOpt and write its FP8 export."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("quantize", help="calibrate a checkpoint for FP8 weights and an FP8 KV cache")
    parser.add_argument("checkpoint", type=Path, help="Hugging Face-format directory, plain or SwiftKV")
    parser.add_argument("-o", "--output", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument(
        "--recipe", required=True, help="fp8: weights and KV cache; fp8-kv: the KV cache only, weights unchanged"
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="UTF-8 text to calibrate with (default: generated text)"
    )
    parser.add_argument("--num-samples", type=int, default=128, metavar="N", help="sequences to calibrate with (128)")
    parser.add_argument("--num-tokens", type=int, default=512, metavar="N", help="tokens of a sequence (512)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantize, with a progress bar on standard error; prints one line (or JSON) at the end."""
    from tqdm import tqdm

    from kvforge.quantize import quantize_checkpoint

    with tqdm(total=args.num_samples, unit="sample", leave=False, disable=not sys.stderr.isatty()) as bar:

        def show(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        summary = quantize_checkpoint(
            args.checkpoint,
            args.output,
            args.recipe,
            calibration=args.calibration,
            num_samples=args.num_samples,
            num_tokens=args.num_tokens,
            progress=show,
        )
    if args.json:
        print(json.dumps(asdict(summary), indent=1))
    else:
        print(
            f"{summary.output}: {summary.model_type}, recipe {summary.recipe}, {summary.weight_bytes / 1e6:.1f} MB of "
            f"weights, KV scales of {len(summary.kv_scales)} owners from {summary.num_tokens} tokens"
        )
    return 0
