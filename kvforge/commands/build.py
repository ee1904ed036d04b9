"""``kvforge build``: checkpoint to engine."""

import argparse
import dataclasses
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from kvforge.kv_policies import policies

if TYPE_CHECKING:
    from kvforge.compiler import BuildOptions


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("build", help="compile a checkpoint into an engine directory")
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", help="Hugging Face-format directory (config.json, *.safetensors)"
    )
    parser.add_argument("-o", "--output", type=Path, help="engine directory to write")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="YAML file with what is not given here (docs/recipes.md)"
    )
    parser.add_argument("--target", help="cpu (this machine, the default), cuda or tensorrt")
    parser.add_argument("--dtype", help="auto (the default), float32 or bfloat16: weights and arithmetic")
    parser.add_argument(
        "--weight-dtype",
        help="weights of linear layers: auto (the default: as --dtype) or int8 (a scale per output; --target cpu)",
    )
    parser.add_argument(
        "--kv-dtype",
        help="the KV cache: auto (the default), float32, bfloat16, fp8 or int8 (a scale per token and head), "
        "fp8_static or int8_static (a scale per layer, from a calibrated checkpoint)",
    )
    parser.add_argument("--max-num-seqs", type=int, help="sequences in one step (default: 64)")
    parser.add_argument("--max-num-tokens", type=int, help="packed tokens in one step (default: 2048)")
    parser.add_argument("--max-seq-len", type=int, help="tokens of prompt and output (default: the model's maximum)")
    parser.add_argument("--page-size", type=int, help="tokens in a KV cache page (default: 32)")
    parser.add_argument(
        "--max-draft-len",
        type=int,
        help="draft tokens of a sequence in one step, for speculative decoding (default: 0, none)",
    )
    parser.add_argument(
        "--no-early-exit",
        dest="early_exit",
        action="store_const",
        const=False,
        help="leave the checkpoint's early-exit head out (default: build it where there is one)",
    )
    parser.add_argument(
        "--no-decoupled-mode",
        dest="decoupled_mode",
        action="store_const",
        const=False,
        help="have `kvforge serve` give one response a request and no streaming, unless it is told --decoupled",
    )
    parser.add_argument(
        "--kv-policy",
        metavar="POLICY",
        help="what becomes of K,V once they are written (docs/kv-policies.md): "
        f"{', '.join(str(policy()) for policy in policies().values())}; default full",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing engine")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build, showing the stage being worked on; prints one line (or the manifest) at the end."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    from tqdm import tqdm

    from kvforge.compiler import build_engine
    from kvforge.compiler.build import stages

    logging.getLogger("torch").setLevel(logging.ERROR)
    checkpoint, output, options = _what_to_build(args)
    names = stages(options)
    started = time.monotonic()
    with tqdm(total=len(names), file=sys.stderr, unit="stage", leave=False, disable=not sys.stderr.isatty()) as bar:

        def show(stage: str) -> None:
            bar.n = names.index(stage)
            bar.set_description(stage)

        manifest = build_engine(checkpoint, output, options, overwrite=args.force, progress=show)
    if args.json:
        print(json.dumps(manifest.to_json(), indent=1))
    else:
        left_out = "; ONNX only, for plans build where TensorRT and a GPU are" if manifest.isa == ("onnx",) else ""
        cut = f"cut {manifest.cut} of " if manifest.cut < manifest.num_layers else ""
        print(
            f"{output}: {manifest.model_type}, {manifest.num_parameters / 1e6:.1f}M parameters, "
            f"{cut}{manifest.num_layers} layers, {manifest.kv_bytes_per_token} KV bytes per token, "
            f"built in {time.monotonic() - started:.0f} s{left_out}"
        )
    return 0


def _what_to_build(args: argparse.Namespace) -> "tuple[Path, Path, BuildOptions]":
    """Return checkpoint, output and options: the recipe's where there is one, overridden by the command line.

    Raises BuildError for a bad recipe, a checkpoint that is not what it expects, or a missing path.
    """
    from kvforge.common.errors import BuildError
    from kvforge.compiler import BuildOptions
    from kvforge.compiler.recipe import load_recipe

    recipe = load_recipe(args.recipe) if args.recipe is not None else None
    flags = {field.name: getattr(args, field.name) for field in dataclasses.fields(BuildOptions)}
    given = {name: value for name, value in flags.items() if value is not None}
    checkpoint, output = args.checkpoint, args.output
    if recipe is not None:
        given = recipe.given | given
        checkpoint, output = checkpoint or recipe.checkpoint, output or recipe.output
    if checkpoint is None or output is None:
        missing = "a checkpoint directory" if checkpoint is None else "an engine directory to write (-o)"
        raise BuildError(f"kvforge build needs {missing}; give it, or a --recipe that names it.")
    if recipe is not None:
        recipe.check_checkpoint(checkpoint)
    return checkpoint, output, BuildOptions(**given)
