"""Runs an operator by one of its backends on CPU tensors.

`python -m tests.support.operators.backends BACKEND SEEDS OPERATOR...` checks the small random cases of these seeds,
`0,5,9`, and prints one JSON line for each: {"operator": "paged_attention", "seed": 5, "wrong": null} or what is wrong.
Triton needs a process with TRITON_INTERPRET=1.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import plugins
from plugins.registry import backend_modules
from tests.support.operators.cases import case, difference, reference, run


def run_cpu(name: str, args: tuple) -> list[Tensor]:
    """The C++ kernels, as the dispatcher calls them."""
    return run(name, args, getattr(torch.ops.kvforge, name))


def run_triton(name: str, args: tuple) -> list[Tensor]:
    """The Triton kernels in Triton's interpreter."""
    import tests.support.cuda.triton_interpreter  # noqa: F401 (before any kernel: it sets the interpreter right)

    return run(name, args, backend_modules("triton")[name].launch)


def run_onnx(name: str, args: tuple) -> list[Tensor]:
    """The ONNX function bodies in onnxruntime."""
    from tests.support.onnx.nodes import run_nodes

    return run_nodes(name, args)


BACKENDS: dict[str, Callable[[str, tuple], list[Tensor]]] = {"cpu": run_cpu, "onnx": run_onnx, "triton": run_triton}


def check(backend: str, name: str, seed: int, *, small: bool) -> str | None:
    """None when the backend's result of the random case is the reference's, else what is wrong."""
    args = case(name, seed, small=small, mixed=backend == "cpu")
    return difference(name, args, BACKENDS[backend](name, args), reference(name, args))


def main() -> None:
    """Check the cases named on the command line."""
    backend, seeds, *names = sys.argv[1:]
    torch.set_num_threads(1)
    if backend == "cpu":
        plugins.load_library()
    for name in names:
        for seed in map(int, seeds.split(",")):
            found = {"operator": name, "seed": seed, "wrong": check(backend, name, seed, small=True)}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
