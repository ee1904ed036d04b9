"""``kvforge build``: checkpoint to engine."""

import argparse
import dataclasses
import json
import logging
import sys
import time
import warnings
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("build", help="compile a checkpoint into an engine directory")
    parser.add_argument("checkpoint", type=Path, help="Hugging Face-format directory (config.json, *.safetensors)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="engine directory to write")
    parser.add_argument("--target", default="cpu", help="cpu (this machine, the default), cuda or tensorrt")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16: weights and arithmetic")
    parser.add_argument(
        "--kv-dtype",
        default="auto",
        help="the KV cache: auto, float32, bfloat16, fp8 or int8 (a scale per token and head), fp8_static or "
        "int8_static (a scale per layer, from a calibrated checkpoint)",
    )
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences in one step (default: 64)")
    parser.add_argument("--max-num-tokens", type=int, default=2048, help="packed tokens in one step (default: 2048)")
    parser.add_argument("--max-seq-len", type=int, help="tokens of prompt and output (default: the model's maximum)")
    parser.add_argument("--page-size", type=int, default=32, help="tokens in a KV cache page (default: 32)")
    parser.add_argument(
        "--max-draft-len",
        type=int,
        default=0,
        help="draft tokens of a sequence in one step, for speculative decoding (default: 0, none)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing engine")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build, showing the stage being worked on; prints one line (or the manifest) at the end."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    from tqdm import tqdm

    from kvforge.compiler import BuildOptions, build_engine
    from kvforge.compiler.build import stages

    logging.getLogger("torch").setLevel(logging.ERROR)
    options = BuildOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(BuildOptions)})
    names = stages(options)
    started = time.monotonic()
    with tqdm(total=len(names), file=sys.stderr, unit="stage", leave=False, disable=not sys.stderr.isatty()) as bar:

        def show(stage: str) -> None:
            bar.n = names.index(stage)
            bar.set_description(stage)

        manifest = build_engine(args.checkpoint, args.output, options, overwrite=args.force, progress=show)
    if args.json:
        print(json.dumps(manifest.to_json(), indent=1))
    else:
        print(
            f"{args.output}: {manifest.model_type}, {manifest.num_parameters / 1e6:.1f}M parameters, "
            f"cut {manifest.cut} of {manifest.num_layers} layers, {manifest.kv_bytes_per_token} KV bytes per token, "
            f"built in {time.monotonic() - started:.0f} s"
        )
    return 0
