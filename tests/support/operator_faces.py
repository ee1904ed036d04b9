"""Runs an operator by one of its faces on CPU tensors.

`python -m tests.support.operator_faces FACE OPERATOR FIRST LAST` checks small random cases and prints one JSON line
for each: {"seed": 3, "wrong": null} or what is wrong. The Triton face needs a process with TRITON_INTERPRET=1.
"""

import importlib
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import plugins
from tests.support.operator_cases import CASES, difference, fresh, reference, results


def run_cpu(name: str, args: tuple) -> list[Tensor]:
    """The C++ kernels, as the dispatcher calls them."""
    args = fresh(name, args)
    return results(name, args, getattr(torch.ops.kvforge, name)(*args))


def run_triton(name: str, args: tuple) -> list[Tensor]:
    """The Triton kernels in Triton's interpreter."""
    import tests.support.triton_interpreter  # noqa: F401 (before any kernel: it sets the interpreter right)

    args = fresh(name, args)
    return results(name, args, importlib.import_module(f"plugins.{name}.cuda").launch(*args))


def run_onnx(name: str, args: tuple) -> list[Tensor]:
    """The ONNX function body in onnxruntime."""
    from tests.support.onnx_operators import run_operator

    onnx_name = "".join(part.capitalize() for part in name.split("_"))
    if name == "rope_paged_kv_write":
        *inputs, k_scale, v_scale = args
        tensors, scales = tuple(x for x in inputs if x is not None), {"k_scale": k_scale, "v_scale": v_scale}
        dynamic, types = len(tensors) == 9, tuple(x.dtype for x in tensors[5:])
        return run_operator(onnx_name + "Dynamic" * dynamic, tensors, {} if dynamic else scales, types)
    if name == "paged_attention":
        *inputs, scale, window, k_scales, v_scales, k_scale, v_scale = args
        attributes = {"scale": scale, "window": window}
        if k_scales is not None:
            return run_operator(onnx_name + "Dynamic", (*inputs, k_scales, v_scales), attributes, (args[0].dtype,))
        attributes |= {"k_scale": k_scale, "v_scale": v_scale}
        return run_operator(onnx_name, tuple(inputs), attributes, (args[0].dtype,))
    if name == "landmark_select":
        *inputs, num_selected, scale, max_selected = args
        (scores,) = run_operator(onnx_name + "Scores", tuple(inputs), {"scale": scale}, (torch.float32,))
        attributes = {"kv_heads": inputs[1].shape[2], "max_selected": max_selected}
        return run_operator(onnx_name + "Choose", (scores, inputs[5], num_selected), attributes, (torch.int32,))
    types = (torch.int32, torch.int32) if name == "speculative_verify" else (args[0].dtype,)
    return run_operator(onnx_name, args, {}, types)


FACES: dict[str, Callable[[str, tuple], list[Tensor]]] = {"cpu": run_cpu, "onnx": run_onnx, "triton": run_triton}


def check(face: str, name: str, seed: int, *, small: bool) -> str | None:
    """None when the face's result of the random case is the reference's, else what is wrong."""
    args = CASES[name](seed, small=small)
    return difference(name, args, FACES[face](name, args), reference(name, args))


def main() -> None:
    """Check the cases named on the command line."""
    face, name, first, last = sys.argv[1:]
    torch.set_num_threads(1)
    if face == "cpu":
        plugins.load_library()
    for seed in range(int(first), int(last)):
        print(json.dumps({"seed": seed, "wrong": check(face, name, seed, small=True)}), flush=True)


if __name__ == "__main__":
    main()
