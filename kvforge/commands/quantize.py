"""``kvforge quantize``: calibrate a checkpoint for FP8, with NVIDIA ModelOpt, or for weights in 4 bits."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from kvforge.commands.parsers import add_calibration, add_checkpoint, add_command, add_force, checkpoint_of, display_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "quantize",
        help="calibrate a checkpoint for FP8 weights and an FP8 KV cache, or for int4 weights",
        example="kvforge quantize CHECKPOINT -o checkpoints/fp8 --recipe fp8",
    )
    add_checkpoint(parser, "checkpoint", help="Hugging Face-format directory, plain or SwiftKV")
    parser.add_argument("-o", "--output", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument(
        "--recipe",
        required=True,
        help="fp8: weights and KV cache; fp8-kv: the KV cache only, weights unchanged; int4: weights in 4 bits (GPTQ)",
    )
    add_calibration(parser, "calibrate with", 128)
    add_force(parser)
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantize, with progress on standard error; prints one line (or JSON) at the end."""
    checkpoint = checkpoint_of(args, args.checkpoint)
    from kvforge.quantize import quantize_checkpoint

    with display_of(args).progress("layer" if args.recipe == "int4" else "sample") as show:
        summary = quantize_checkpoint(
            checkpoint,
            args.output,
            args.recipe,
            calibration=args.calibration,
            num_samples=args.num_samples,
            num_tokens=args.num_tokens,
            overwrite=args.force,
            progress=lambda done, total: show(done, total, ""),
        )
    if args.json:
        print(json.dumps(asdict(summary), indent=1))
    else:
        print(
            f"{summary.output}: {summary.model_type}, recipe {summary.recipe}, {summary.weight_bytes / 1e6:.1f} MB of "
            f"weights, KV scales of {len(summary.kv_scales)} owners from {summary.num_tokens} tokens"
        )
    return 0
