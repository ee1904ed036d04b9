"""``kvforge plugins``: the operators, their versions, where each backend runs, and the tests that verify it."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.commands.parsers import add_command, display_of
from kvforge.common.errors import KvforgeError
from kvforge.common.suggestions import did_you_mean

if TYPE_CHECKING:
    from plugins import Operator


@dataclass(frozen=True)
class Backend:
    """A kind of implementation: what executes it, and the tests that hold it against the reference, ``{operator}``
    standing for the name of an operator of this project."""

    runs: str
    tests: tuple[str, ...]


_ROOT = Path(__file__).resolve().parents[2]
_ALL = "tests/cpu/plugins/test_every_backend.py"
_OWN = "tests/cpu/plugins/test_{operator}.py"

BACKENDS = {
    "reference": Backend("plain torch: the definition", (_OWN,)),
    "cpu": Backend("target cpu: compiled C++", (_ALL, _OWN, "tests/cpu/plugins/test_sanitizer.py")),
    "triton": Backend(
        "targets cuda and tensorrt: Triton kernels",
        (_ALL, "tests/cpu/plugins/test_triton_kernels.py", "tests/gpu/test_operators_cuda.py"),
    ),
    "onnx": Backend("any ONNX runtime: a function body", (_ALL, "tests/cpu/plugins/test_onnx_operators.py")),
    "tensorrt": Backend(
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
    parser = add_command(
        subparsers,
        "plugins",
        help="list the operators, their backends and what verifies them",
        example="kvforge plugins paged_attention",
    )
    parser.add_argument("name", nargs="?", help="an operator: where its backends run, and the tests that verify each")
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    parser.set_defaults(run=run)


def describe() -> list[dict[str, Any]]:
    """Return name, version, schema and backends of every operator in ``plugins.OPERATORS``."""
    import plugins
    from plugins.operator import BACKEND_FILES

    return [
        {
            "name": operator.name,
            "version": operator.version,
            "schema": operator.schema,
            "backends": [
                {
                    "name": backend,
                    "file": _display(operator.folder / BACKEND_FILES[backend]),
                    "runs": BACKENDS[backend].runs,
                    "verified_by": _tests(backend, operator),
                }
                for backend in operator.backends
            ],
        }
        for operator in plugins.OPERATORS.values()
    ]


def _display(file: Path) -> str:
    """The path below the product's root, or the whole path of a file elsewhere."""
    return str(file.relative_to(_ROOT)) if file.is_relative_to(_ROOT) else str(file)


def _tests(backend: str, operator: "Operator") -> list[str]:
    """The tests of this project; one of an operator's own is here if the operator is."""
    is_own = operator.folder.is_relative_to(_ROOT / "plugins")
    return [test.format(operator=operator.name) for test in BACKENDS[backend].tests if is_own or test != _OWN]


def run(args: argparse.Namespace) -> int:
    """Print a line for each operator, or all about one. Raises KvforgeError where there is none of its name."""
    operators = describe()
    if args.name is not None:
        operators = [_named(args.name, operators)]
    if args.json:
        print(json.dumps(operators, indent=1))
    elif args.name is not None:
        _print_backends(operators[0])
    else:
        _print_table(operators)
        display_of(args).note("`kvforge plugins NAME` prints where an operator's backends run, and what verifies them.")
    return 0


def _named(name: str, operators: list[dict[str, Any]]) -> dict[str, Any]:
    found = {operator["name"]: operator for operator in operators}
    plain = name.removeprefix("kvforge::")
    if plain not in found:
        advice = did_you_mean(plain, found) or "; kvforge plugins lists them."
        raise KvforgeError(f"There is no operator {name}{advice}")
    return found[plain]


def _print_table(operators: list[dict[str, Any]]) -> None:
    width = max(len(operator["name"]) for operator in operators)
    print(f"{'operator':<{width}}  version  backends")
    for operator in operators:
        backends = ", ".join(backend["name"] for backend in operator["backends"])
        print(f"{operator['name']:<{width}}  {operator['version']:>7}  {backends}")


def _print_backends(operator: dict[str, Any]) -> None:
    print(f"kvforge::{operator['name']}, version {operator['version']}")
    for backend in operator["backends"]:
        print(f"  {backend['name']:<10} {backend['runs']}")
        for test in backend["verified_by"]:
            print(f"{'':<13}{test}{' (needs a GPU)' if test.startswith('tests/gpu') else ''}")
