"""Target ``tensorrt``: ONNX graphs anywhere, and plans of them where a TensorRT is that builds here."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvforge.common.errors import BuildError
from kvforge.common.extras import how_to_install
from kvforge.compiler.options import ResolvedOptions
from kvforge.manifest import RANK_DIR, WEIGHTS_FILE
from kvforge.tensorrt import rtx, tensorrt11
from kvforge.tensorrt.installed import flavour, installed_flavour
from model_defs import ModelConfig

BESIDE_WEIGHTS = False
"""Graphs refer to the file of weights."""


def builds_plans() -> bool:
    """Whether plans are built beside the ONNX files: by TensorRT for RTX anywhere, by TensorRT 11 where a GPU is."""
    name = installed_flavour()
    return name == rtx.NAME or (name == tensorrt11.NAME and torch.cuda.is_available())


def check_onnx() -> None:
    """Raise BuildError when a package that writes ONNX is missing."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(
            f"Target tensorrt writes ONNX, which needs {' and '.join(missing)}; install them with "
            f"{how_to_install('onnx')}."
        )


def check_toolchain(options: ResolvedOptions) -> None:
    """Raise BuildError when the packages that write ONNX are missing, or plans are not built here for the GPUs that are
    asked for."""
    check_onnx()
    if builds_plans():
        if importlib.util.find_spec("triton") is None:
            raise BuildError(
                f"The kernels in plans are compiled by Triton; install it with {how_to_install(rtx.NAME)}."
            )
        flavour().capabilities(options.compute_capabilities, options.torch_kv_dtype)
    elif options.compute_capabilities != "auto":
        raise BuildError(
            "--compute-capabilities says what plans are built for, and nothing here builds plans; install TensorRT for "
            f"RTX with {how_to_install(rtx.NAME)}, or leave it out."
        )


def isa() -> tuple[str, ...]:
    """Return what plans are built for: the GPU's compute capability, e.g. ``("sm_90",)``, ``("tensorrt-rtx",)`` for
    GPUs that the manifest names, or ``("onnx",)`` without plans."""
    if not builds_plans():
        return ("onnx",)
    if flavour().NAME == rtx.NAME:
        return (rtx.NAME,)
    major, minor = torch.cuda.get_device_capability()
    return (f"sm_{major}{minor}",)


def stages(graphs: tuple[str, ...]) -> tuple[str, ...]:
    """Return what ``write_graphs`` calls ``progress`` with for these graphs, in order."""
    builds = graphs if builds_plans() else ()
    return (*(f"export {name}" for name in graphs), *(f"build {name}" for name in builds))


def write_graphs(
    config: ModelConfig, options: ResolvedOptions, staging: Path, progress: Callable[[str], object]
) -> dict[str, Any]:
    """Write ``<graph>.onnx`` beside the weights, which stay in their file, and where TensorRT is, ``<graph>.plan``;
    return the manifest's fields of the plans.

    Raises:
        BuildError: a graph is not what the model says, or TensorRT cannot build it.
    """
    from kvforge.compiler.onnx_export import write_onnx

    with_plans = builds_plans()
    for name in options.graphs:
        progress(f"export {name}")
        write_onnx(name, config, options, staging / RANK_DIR / f"{name}.onnx", staging / WEIGHTS_FILE)
    if not with_plans:
        return {}
    from kvforge.compiler.tensorrt_process import build_plans_apart

    return build_plans_apart(staging / RANK_DIR, options, progress)
