"""``kvforge distill``: train a rewired checkpoint until it answers as the model it was made from."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from kvforge.commands.parsers import add_checkpoint, add_command, add_force, checkpoint_of, display_of
from kvforge.commands.training_options import LOOP, add_run, add_targets, given
from kvforge.common.errors import KvforgeError
from kvforge.common.extras import how_to_install

_CONFIG = {
    "train": (
        str,
        "partial: what SwiftKV adds; upper: all of the layers above the cut; full: all (default: partial)",
    ),
    **LOOP,
    "hidden_weight": (float, "weight of the relative error of the states entering the last layer (default: 1.0)"),
}
"""Options that are fields of DistillConfig, with what --help says of them."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "distill",
        example="kvforge distill checkpoints/rewired checkpoints/student --data train.jsonl --mask answers",
        help="train the SwiftKV layers of a rewired checkpoint to answer as the original model",
        description=(
            "Distil a checkpoint made by kvforge rewire from its own teacher and write the result. Interrupted, the "
            "same command continues. Several GPUs: torchrun --nproc-per-node N -m kvforge distill ..."
        ),
    )
    add_checkpoint(parser, "checkpoint", help="rewired checkpoint, with its teacher's projections")
    parser.add_argument("output", type=Path, help="checkpoint directory to write")
    parser.add_argument(
        "--data", required=True, help=".jsonl or .txt file, saved dataset, or NAME[:[CONFIG:]SPLIT] of a dataset"
    )
    add_targets(parser)
    parser.add_argument("--early-exit", action="store_true", help="add and train an LM head on the state at the cut")
    parser.add_argument(
        "--draft-head",
        action="store_true",
        help="train an EAGLE-3 head for the checkpoint instead, with a cut or without one; output is the head",
    )
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="with --draft-head: tokens that it drafts, the most frequent of the data (default: all, at most 32000)",
    )
    add_run(parser, _CONFIG)
    parser.add_argument("--keep-teacher", action="store_true", help="write the teacher's projections too")
    parser.add_argument(
        "--export-dtype",
        choices=("source", "bfloat16", "bf16"),
        default="source",
        help="dtype of the written weights",
    )
    add_force(parser, "; a run in --work is continued all the same, and one that is done is only written again")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Distil, with a progress bar on standard error; prints one line (or JSON) at the end."""
    if args.draft_head:
        return _train_head(args)
    if args.draft_vocab is not None:
        raise KvforgeError("--draft-vocab goes with --draft-head; add that, or leave it out.")
    import torch

    from kvforge.distill import DistillConfig, distill_checkpoint, world
    from kvforge.distill.packing import DataSettings

    config = DistillConfig(early_exit=args.early_exit, **given(args, _CONFIG))
    with world.processes(config.device):
        summary = distill_checkpoint(
            checkpoint_of(args, args.checkpoint),
            args.output,
            args.data,
            config,
            DataSettings(config.length, args.mask, args.overlong),
            work=args.work,
            keep_teacher=args.keep_teacher,
            dtype=None if args.export_dtype == "source" else torch.bfloat16,
            overwrite=args.force,
            progress=not args.json and not display_of(args).quiet,
        )
        if world.rank() > 0:
            return 0
    if args.json:
        print(json.dumps(asdict(summary), indent=1))
        return 0
    last = summary.metrics
    print(summary.data.line(args.overlong))
    print(
        f"{summary.output}: {summary.steps} steps, {summary.tokens / 1e6:.2f} M tokens in {summary.seconds:.0f} s; at "
        f"the last step KL {last['kl']:.4f}, agreement {last['agreement']:.1%}"
    )
    plot = summary.plot or f"none ({how_to_install('perf')})"
    print(f"log: {Path(summary.work) / 'metrics.csv'}, plot: {plot}")
    return 0


def _train_head(args: argparse.Namespace) -> int:
    """Train a draft head; prints as ``run`` does."""
    from kvforge.distill import DistillConfig
    from kvforge.distill.draft_run import train_draft_head
    from kvforge.distill.packing import DataSettings

    for flag, is_given in (
        ("--train", args.train is not None),
        ("--hidden-weight", args.hidden_weight is not None),
        ("--early-exit", args.early_exit),
        ("--keep-teacher", args.keep_teacher),
        ("--export-dtype", args.export_dtype != "source"),
    ):
        if is_given:
            raise KvforgeError(f"{flag} is for a student, and --draft-head trains none; leave one of them out.")
    config = DistillConfig(**given(args, _CONFIG))
    summary = train_draft_head(
        checkpoint_of(args, args.checkpoint),
        args.output,
        args.data,
        config,
        DataSettings(config.length, args.mask, args.overlong),
        draft_vocab=args.draft_vocab,
        work=args.work,
        overwrite=args.force,
        progress=not args.json and not display_of(args).quiet,
    )
    if args.json:
        print(json.dumps(asdict(summary), indent=1))
        return 0
    print(summary.data.line(args.overlong))
    print(
        f"{summary.output}: reads what enters layers {', '.join(map(str, summary.layers))}, drafts "
        f"{summary.draft_vocab} tokens; {summary.steps} steps, {summary.tokens / 1e6:.2f} M tokens in "
        f"{summary.seconds:.0f} s; at the last step {summary.metrics['agreement']:.1%} of first drafts agree, and "
        f"{summary.metrics['last_agreement']:.1%} of fourth ones"
    )
    return 0
