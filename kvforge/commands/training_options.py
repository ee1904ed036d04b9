"""Options of the commands that train on packed sequences."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Options = Mapping[str, tuple[type, str]]
"""Fields of ``kvforge.distill.DistillConfig``: their types, and what --help says of them."""

LOOP: Options = {
    "epochs": (float, "passes over the data (default: 2.0)"),
    "max_steps": (int, "optimizer steps, instead of --epochs"),
    "length": (int, "tokens of a packed sequence, at most the model's positions (default: 8192)"),
    "batch_size": (int, "sequences of an optimizer step, over all processes (default: 32)"),
    "micro_batch": (int, "sequences that a process runs at once (default: 1)"),
    "lr": (float, "peak learning rate (default: 0.0003)"),
    "schedule": (str, "after the warm-up: cosine, linear (both to 0) or constant (default: cosine)"),
    "warmup": (float, "share of the steps that the rate rises over (default: 0.05)"),
    "weight_decay": (float, "of AdamW, on matrices (default: 0.05)"),
    "clip_norm": (float, "largest norm of the gradient (default: 1.0)"),
    "temperature": (float, "T of the loss T^2 KL (default: 2.0)"),
    "seed": (int, "of the order of the sequences (default: 0)"),
    "dtype": (str, "bfloat16: autocast, trained weights in fp32; float32: everything (default: bfloat16)"),
    "device": (str, "auto, cpu or cuda (default: auto)"),
    "checkpoint_every": (int, "steps from one saved state to the next (default: 100)"),
}
"""What every run has."""


def add_targets(parser: argparse.ArgumentParser, answers: str = "those of answers") -> None:
    """Declare which tokens are targets, of which ``answers`` says what --mask answers takes, and --overlong."""
    parser.add_argument("--mask", choices=("all", "answers"), default="all", help=f"targets: every token, or {answers}")
    parser.add_argument(
        "--overlong", choices=("split", "truncate", "error"), default="split", help="samples over --length"
    )


def add_run(parser: argparse.ArgumentParser, options: Options) -> None:
    """Declare ``options``, and where the run is kept."""
    for name, (kind, text) in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text, metavar="N" if kind is int else "X")
    parser.add_argument("--work", type=Path, metavar="DIR", help="state and log of the run (default: OUTPUT.training)")


def given(args: argparse.Namespace, options: Options) -> dict[str, Any]:
    """Return those of ``options`` that the command line gives."""
    return {name: getattr(args, name) for name in options if getattr(args, name) is not None}
