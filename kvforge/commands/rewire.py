"""``kvforge rewire``: a plain checkpoint to a SwiftKV one."""

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path

from kvforge.commands.cut_options import add_num_anchors, anchors_of
from kvforge.commands.parsers import add_calibration, add_checkpoint, add_command, add_force, checkpoint_of, display_of

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _cut(text: str) -> int | None:
    return None if text == "auto" else int(text)


_cut.__name__ = "layer or 'auto'"


def _size(text: str) -> int:
    number = text.rstrip("BGIKMbgikm")
    unit = text[len(number) :].upper()
    if unit not in _UNITS or not 0 < float(number) < 1e30:
        raise ValueError
    return int(float(number) * _UNITS[unit])


_size.__name__ = "size such as 5GB"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    from model_defs.hf_config import CUT_KINDS

    parser = add_command(
        subparsers,
        "rewire",
        help="make a SwiftKV checkpoint from a plain one, to be distilled",
        example="kvforge rewire CHECKPOINT checkpoints/rewired --cut-layer auto --init ridge --calibration text.txt",
    )
    add_checkpoint(parser, "source", metavar="SRC", help="Hugging Face-format directory without a cut, or GGUF file")
    parser.add_argument("output", type=Path, metavar="DST", help="checkpoint directory to write")
    parser.add_argument(
        "--cut-layer",
        dest="cut",
        type=_cut,
        required=True,
        metavar="K",
        help="first layer whose K,V come from the single input; auto: the smallest within --quality-budget",
    )
    parser.add_argument("--group-size", type=int, default=1, metavar="G", help="layers that share a cache")
    parser.add_argument(
        "--cut-kind",
        choices=CUT_KINDS,
        default=CUT_KINDS[0],
        help="single-input: layers above the cut have K,V of prompts from one input; blind: they see no prompt but for "
        "its first tokens, and keep their projections",
    )
    add_num_anchors(parser)
    parser.add_argument(
        "--init",
        default="fold",
        help="the new K,V projections: copy (the owner's), mean (of its group), fold (mean with norm gains folded in), "
        "ridge (fitted to the calibration text), minicache (pairs of layers merged, then fitted)",
    )
    parser.add_argument("--drop-teacher", action="store_true", help="leave out q, k and v of the layers above the cut")
    parser.add_argument("--early-exit", action="store_true", help="add a norm and an LM head at the cut")
    add_calibration(parser, "measure and fit on", 64)
    parser.add_argument(
        "--quality-budget",
        type=float,
        default=0.1,
        metavar="X",
        help="largest unexplained share of any layer's K, V or updates of a state, for auto",
    )
    parser.add_argument(
        "--ridge",
        type=float,
        default=1e-2,
        metavar="LAMBDA",
        help="regulariser, relative to the inputs",
    )
    parser.add_argument(
        "--max-shard-size", dest="max_shard_bytes", type=_size, default="5GB", metavar="SIZE", help="of a file"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="similarity of the layers' inputs (.png, .svg, .pdf)")
    add_force(parser)
    parser.add_argument("--json", action="store_true", help="print what was measured and written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rewire, with progress on standard error; prints tables and one line, or JSON."""
    from kvforge.rewire import RewireOptions, rewire_checkpoint
    from kvforge.rewire.report import describe

    args.num_anchors = anchors_of([args.cut_kind], args.num_anchors)[0]
    options = RewireOptions(**{field.name: getattr(args, field.name) for field in fields(RewireOptions)})
    source = checkpoint_of(args, args.source)
    with display_of(args).progress("step") as show:
        summary = rewire_checkpoint(
            source,
            args.output,
            options,
            calibration=args.calibration,
            plot=args.plot,
            overwrite=args.force,
            progress=lambda stage, done, total: show(done, total, stage),
        )
    print(json.dumps(asdict(summary), indent=1) if args.json else describe(summary))
    return 0
