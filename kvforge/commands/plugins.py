"""``kvforge plugins``: the operators, their versions, where each face runs, and the tests that verify it."""

import argparse
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Face:
    """A kind of implementation: its file in ``plugins/<operator>/``, what executes it, and the tests that hold it
    against the reference, ``{operator}`` standing for the operator's name."""

    file: str
    runs: str
    tests: tuple[str, ...]


_ALL = "tests/cpu/plugins/test_every_face.py"
_OWN = "tests/cpu/plugins/test_{operator}.py"

FACES = {
    "reference": Face("reference.py", "plain torch: the definition", (_OWN,)),
    "cpu": Face("cpu.cpp", "target cpu: compiled C++", (_ALL, _OWN, "tests/cpu/plugins/test_sanitizer.py")),
    "triton": Face(
        "cuda.py",
        "targets cuda and tensorrt: Triton kernels",
        (_ALL, "tests/cpu/plugins/test_triton_kernels.py", "tests/gpu/test_operators_cuda.py"),
    ),
    "onnx": Face("onnx.py", "any ONNX runtime: a function body", (_ALL, "tests/cpu/plugins/test_onnx_operators.py")),
    "tensorrt": Face(
        "trt.py",
        "target tensorrt: a plugin with PTX",
        (
            "tests/trt/test_plugin_contract.py",
            "tests/cpu/plugins/test_triton_ptx.py",
            "tests/gpu/test_ptx_driver.py",
        ),
    ),
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("plugins", help="list the operators, their faces and what verifies them")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def describe() -> list[dict[str, Any]]:
    """Return name, version, schema and faces of every operator in ``plugins.OPERATORS``."""
    import plugins

    return [
        {
            "name": operator.name,
            "version": operator.version,
            "schema": operator.schema,
            "faces": [
                {
                    "name": face,
                    "file": f"plugins/{operator.name}/{FACES[face].file}",
                    "runs": FACES[face].runs,
                    "verified_by": [test.format(operator=operator.name) for test in FACES[face].tests],
                }
                for face in operator.faces
            ],
        }
        for operator in plugins.OPERATORS.values()
    ]


def run(args: argparse.Namespace) -> int:
    """Print every operator with its faces."""
    operators = describe()
    if args.json:
        print(json.dumps(operators, indent=1))
        return 0
    for operator in operators:
        print(f"kvforge::{operator['name']}, version {operator['version']}")
        for face in operator["faces"]:
            print(f"  {face['name']:<10} {face['runs']}")
            for test in face["verified_by"]:
                print(f"{'':<13}{test}{' (needs a GPU)' if test.startswith('tests/gpu') else ''}")
    return 0
