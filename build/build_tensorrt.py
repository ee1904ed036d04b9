"""Builds an engine with TensorRT plans: by TensorRT for RTX on any machine, or by TensorRT 11 on the machine and GPU
that will run it (for example in NVIDIA's container).

    python build/build_tensorrt.py --recipe build/recipes/llama-3.1-8b-swiftkv-tensorrt-fp8.yaml
    python build/build_tensorrt.py CHECKPOINT -o ENGINE --kv-dtype int8 --max-draft-len 4

Takes what `kvforge build` takes; the target is tensorrt. Without a TensorRT that builds here it stops before any work,
where `kvforge build --target tensorrt` would write the ONNX files alone.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

import torch

from kvforge import cli
from kvforge.common.errors import KvforgeError
from kvforge.compiler.targets import tensorrt
from kvforge.tensorrt.installed import flavour


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a KvforgeError is printed as one line and gives 1."""
    parser = argparse.ArgumentParser(
        description="Build an engine with TensorRT plans. Other options: those of kvforge build."
    )
    parser.add_argument("checkpoint", nargs="?", help="Hugging Face-format directory")
    parser.add_argument("-o", "--output", help="engine directory to write")
    parser.add_argument("--recipe", help="YAML file with what is not given here")
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser.parse_known_args(arguments)  # answers --help
    try:
        check_machine()
    except KvforgeError as error:
        print(f"build_tensorrt: error: {error}", file=sys.stderr)
        return 1
    return cli.main(["build", *arguments, "--target", "tensorrt"])


def check_machine() -> None:
    """Raise KvforgeError unless a TensorRT, the packages that write ONNX, and for TensorRT 11 a GPU that the plugins
    support are here."""
    importlib.import_module("kvforge.tensorrt.api")
    tensorrt.check_onnx()
    flavour().capabilities("auto", torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
