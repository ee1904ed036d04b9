"""``kvforge build``: checkpoint to engine."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvforge.commands.build_options import add_build_options, given_options
from kvforge.commands.check_against import PACKAGE, check_comparable, compare, sentence
from kvforge.commands.parsers import add_checkpoint, add_command, checkpoint_of, display_of

if TYPE_CHECKING:
    from kvforge.compiler import BuildOptions


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "build",
        help="compile a checkpoint into an engine directory",
        example="kvforge build CHECKPOINT -o ENGINE --kv-dtype fp8",
    )
    add_checkpoint(parser, "checkpoint", nargs="?", help="Hugging Face-format directory, or GGUF file")
    parser.add_argument("-o", "--output", type=Path, help="engine directory to write")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="YAML file with what is not given here, as docs/recipes.md says"
    )
    add_build_options(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing engine")
    parser.add_argument(
        "--check-against",
        nargs="?",
        const=PACKAGE,
        metavar="TEXT",
        help="then compare the engine with its model unrounded, on a UTF-8 text or on the one that comes with kvforge: "
        "KL, and how often both find the same token most probable",
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build, showing the stage being worked on; prints one line (or the manifest) at the end, and with
    ``--check-against`` how far the engine is from its model."""
    checkpoint, output, options = _what_to_build(args)
    from kvforge.compiler import build_engine
    from kvforge.compiler.build import stages
    from kvforge.compiler.progress import BuildProgress

    if args.check_against is not None:
        check_comparable(checkpoint, options, args.check_against)
    started = time.monotonic()
    with BuildProgress(display_of(args), stages(options)) as shown:
        manifest = build_engine(
            checkpoint, output, options, overwrite=args.force, progress=shown.stage, converted=shown.converted
        )
    built_in = time.monotonic() - started
    found = None
    if args.check_against is not None:
        found = compare(checkpoint, output, manifest, options, args.check_against, display_of(args))
    if args.json:
        print(json.dumps(manifest.shown() | ({} if found is None else {"check_against": found}), indent=1))
    else:
        left_out = "; ONNX only, kvforge doctor says what builds plans" if manifest.isa == ("onnx",) else ""
        cut = f"cut {manifest.model.cut} of " if manifest.model.has_cut else ""
        more = f" and {manifest.auxiliary_bytes_per_token} of the auxiliary model" if manifest.predicts else ""
        if manifest.draft_head is not None:
            more += f" and {manifest.draft_head_bytes_per_token} of the draft head"
        print(
            f"{output}: {manifest.model.model_type}, {manifest.num_parameters / 1e6:.1f}M parameters, "
            f"{cut}{manifest.model.num_layers} layers, {manifest.kv_bytes_per_token} KV bytes per token{more}, "
            f"built in {built_in:.0f} s{left_out}"
        )
        if found is not None:
            print(sentence(found))
    return 0


def _what_to_build(args: argparse.Namespace) -> "tuple[Path, Path, BuildOptions]":
    """Return checkpoint, output and options: the recipe's where there is one, overridden by the command line.

    Raises BuildError for a bad recipe, a checkpoint that is not what it expects, or a missing path; without a recipe
    CheckpointError for a checkpoint that is none before torch is imported.
    """
    from kvforge.common.errors import BuildError
    from kvforge.manifest.engine_dir import check_output

    recipe = None
    if args.recipe is not None:
        from kvforge.compiler.recipe import load_recipe

        recipe = load_recipe(args.recipe)
    given = given_options(args)
    name, output = args.checkpoint, args.output
    if recipe is not None:
        given = recipe.given | given
        name, output = name or recipe.checkpoint, output or recipe.output
    if name is None or output is None:
        missing = "a checkpoint" if name is None else "an engine directory to write (-o)"
        raise BuildError(f"kvforge build needs {missing}; give it, or a --recipe that names it.")
    check_output(output, args.force)
    checkpoint = checkpoint_of(args, name, given.get("draft_head"))
    if recipe is not None:
        recipe.check_checkpoint(checkpoint)
    from kvforge.compiler import BuildOptions

    return checkpoint, output, BuildOptions(**given)
