"""``kvforge predict``: a small model that fills the cache of a large one."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from kvforge.commands.parsers import add_calibration, add_checkpoint, add_command, add_force, checkpoint_of, display_of
from kvforge.commands.training_options import LOOP, add_run, add_targets, given

_LOOP = {
    **LOOP,
    "length": (int, "tokens of a packed sequence, at most the models' positions (default: 8192)"),
    "batch_size": (int, "sequences of an optimizer step (default: 32)"),
    "micro_batch": (int, "sequences that are run at once (default: 1)"),
    "dtype": (str, "bfloat16: autocast, the predictor in fp32; float32: everything (default: bfloat16)"),
}
"""Options that are fields of DistillConfig, with what --help says of them."""


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


_layers.__name__ = "list of layers such as 0,0,1,1"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command and its two parts."""
    parser = add_command(
        subparsers,
        "predict",
        help="train a small model that fills or scores the cache of a large one (KV prediction, KVzap)",
        example="kvforge predict train CHECKPOINT checkpoints/auxiliary -o checkpoints/predictor --data train.jsonl",
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    _add_train(parts)
    _add_scorer(parts)
    truncating = add_command(
        parts,
        "truncate",
        help="make an auxiliary model of the lower layers of another one",
        example="kvforge predict truncate CHECKPOINT -o checkpoints/auxiliary --layers 4",
    )
    add_checkpoint(truncating, "source", metavar="SRC", help="Hugging Face-format directory without a cut")
    truncating.add_argument("-o", "--output", type=Path, required=True, help="checkpoint directory to write")
    truncating.add_argument("--layers", type=int, required=True, metavar="N", help="layers to keep")
    add_force(truncating)
    truncating.set_defaults(run=run_truncate)


_SCORER_LOOP = {
    "epochs": (float, "passes over the tokens (default: 15)"),
    "max_steps": (int, "optimizer steps, instead of --epochs"),
    "batch_size": (int, "tokens of an optimizer step (default: 512)"),
    "lr": (float, "peak learning rate (default: 0.005)"),
    "seed": (int, "of the first weights and the order of the tokens (default: 0)"),
    "checkpoint_every": LOOP["checkpoint_every"],
}
"""Options that are fields of DistillConfig, for scorers with a hidden layer."""


def _add_scorer(parts: argparse._SubParsersAction) -> None:
    scorer = add_command(
        parts,
        "scorer",
        help="train what scores the tokens of a model's cache (KVzap)",
        example="kvforge predict scorer CHECKPOINT -o CHECKPOINT/kvzap --hidden-units 512",
        description=(
            "Train what scores the tokens of a cache for --kv-policy kvzap. The model repeats texts, KVzip+ scores "
            "their tokens, and the scorer learns to predict these scores from hidden states. Interrupted, the same "
            "command continues."
        ),
    )
    add_checkpoint(scorer, "source", metavar="CHECKPOINT", help="Hugging Face-format directory, plain or SwiftKV")
    scorer.add_argument("-o", "--output", type=Path, required=True, help="directory to write the scorer to")
    scorer.add_argument("--hidden-units", type=int, default=0, metavar="N", help="of its hidden layer; 0: linear")
    add_calibration(scorer, "be scored", 128)
    add_run(scorer, _SCORER_LOOP)
    add_force(scorer, "; a run in --work is continued all the same")
    scorer.add_argument("--json", action="store_true", help="print what was written as JSON")
    scorer.set_defaults(run=run_scorer)


def run_scorer(args: argparse.Namespace) -> int:
    """Score and train, with progress on standard error; prints one line, or JSON."""
    from dataclasses import replace

    from kvforge.prediction.scorer_training import LOOP as DEFAULTS
    from kvforge.prediction.scorer_training import ScorerOptions, train_scorer

    loop = replace(DEFAULTS, **given(args, _SCORER_LOOP))
    options = ScorerOptions(args.hidden_units, args.num_samples, args.num_tokens, args.calibration, loop)
    with display_of(args).progress("text") as show:
        summary = train_scorer(
            checkpoint_of(args, args.source),
            args.output,
            options,
            work=args.work,
            overwrite=args.force,
            progress=not args.json and not display_of(args).quiet,
            scoring=lambda done, total: show(done, total, "scoring"),
        )
    if args.json:
        print(json.dumps(asdict(summary), indent=1))
        return 0
    kind = f"{summary.units} hidden units, {summary.steps} steps" if summary.units else "linear"
    missed = ", ".join(f"{one:.3f}" for one in summary.unexplained)
    print(
        f"{summary.output}: {kind}, {summary.parameters} parameters, trained on {summary.tokens} tokens; "
        f"unexplained share of the log scores on held-out text, by owner: {missed}"
    )
    return 0


def _add_train(parts: argparse._SubParsersAction) -> None:
    training = add_command(
        parts,
        "train",
        help="fit the maps of a predictor, and train it",
        example="kvforge predict train CHECKPOINT checkpoints/auxiliary -o checkpoints/predictor --data train.jsonl",
        description=(
            "Fit linear maps from a small model's layers to a base model's K and V, and train both. "
            "Interrupted, the same command continues."
        ),
    )
    add_checkpoint(training, "base", help="checkpoint of the model that generates, without a cut")
    training.add_argument("auxiliary", help="checkpoint of the small model, with the same tokenizer")
    training.add_argument("-o", "--output", type=Path, required=True, help="checkpoint directory to write")
    training.add_argument("--data", help="as of kvforge distill; without it the maps are fitted and nothing is trained")
    add_targets(training, "those of answers, which the base then computes itself as it does at inference")
    training.add_argument(
        "--layers",
        type=_layers,
        metavar="A,B,…",
        help="the auxiliary layer of each of the base's (default: same depth)",
    )
    training.add_argument(
        "--train", default="all", help="maps: these alone; all: also the auxiliary model's layers in use"
    )
    training.add_argument("--kv-weight", type=float, default=1.0, metavar="X", help="of the L1 errors of K and V")
    training.add_argument("--qk-weight", type=float, default=1.0, metavar="X", help="of the squared errors of scores")
    training.add_argument("--ridge", type=float, default=1e-3, metavar="LAMBDA", help="regulariser of the fitted maps")
    add_calibration(training, "fit the maps on", 64)
    add_run(training, _LOOP)
    add_force(training, "; a run in --work is continued all the same, and one that is done is only written again")
    training.add_argument("--json", action="store_true", help="print what was written as JSON")
    training.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Fit and train, with progress on standard error; prints a table and one line, or JSON."""
    from kvforge.distill import DistillConfig
    from kvforge.distill.packing import DataSettings
    from kvforge.prediction.config import PredictConfig
    from kvforge.prediction.report import describe
    from kvforge.prediction.run import FitOptions, train_predictor

    loop = DistillConfig(**given(args, _LOOP))
    config = PredictConfig(
        loop,
        train=args.train,
        kv_weight=args.kv_weight,
        qk_weight=args.qk_weight,
        exact_targets=args.mask == "answers",
    )
    summary = train_predictor(
        checkpoint_of(args, args.base),
        checkpoint_of(args, args.auxiliary),
        args.output,
        args.data,
        config,
        DataSettings(loop.length, args.mask, args.overlong),
        FitOptions(args.ridge, args.num_samples, args.num_tokens, args.calibration),
        layers=args.layers,
        work=args.work,
        overwrite=args.force,
        progress=not args.json and not display_of(args).quiet,
    )
    print(json.dumps(asdict(summary), indent=1) if args.json else describe(summary, args.overlong))
    return 0


def run_truncate(args: argparse.Namespace) -> int:
    """Write the lower layers; prints one line."""
    source = checkpoint_of(args, args.source)
    from kvforge.prediction.truncate import truncate

    truncate(source, args.output, args.layers, overwrite=args.force)
    print(f"{args.output}: the first {args.layers} layers of {args.source}")
    return 0
