"""Target ``tensorrt``: ONNX graphs anywhere, and TensorRT plans of them where TensorRT and a GPU are."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from kvforge.common.errors import BuildError
from kvforge.common.extras import how_to_install
from kvforge.compiler.options import ResolvedOptions
from kvforge.manifest import RANK_DIR, WEIGHTS_FILE
from model_defs import ModelConfig


def builds_plans() -> bool:
    """Whether this machine has TensorRT's builder and a GPU, so that plans are built beside the ONNX files."""
    return torch.cuda.is_available() and importlib.util.find_spec("tensorrt") is not None


def check_onnx() -> None:
    """Raise BuildError when a package that writes ONNX is missing."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(
            f"Target tensorrt writes ONNX, which needs {' and '.join(missing)}; install them with "
            f"{how_to_install('onnx')}."
        )


def check_toolchain() -> None:
    """Raise BuildError when the packages that write ONNX are missing, or a GPU here cannot run what TensorRT builds."""
    check_onnx()
    if builds_plans():
        from kvforge.compiler.tensorrt_build import check_gpu

        check_gpu()


def isa() -> tuple[str, ...]:
    """Return the compute capability that plans are built for, e.g. ``("sm_90",)``, or ``("onnx",)`` without plans."""
    if not builds_plans():
        return ("onnx",)
    major, minor = torch.cuda.get_device_capability()
    return (f"sm_{major}{minor}",)


def stages(graphs: tuple[str, ...]) -> tuple[str, ...]:
    """Return what ``write_graphs`` calls ``progress`` with for these graphs, in order."""
    builds = graphs if builds_plans() else ()
    return (*(f"export {name}" for name in graphs), *(f"build {name}" for name in builds))


def write_graphs(
    config: ModelConfig, options: ResolvedOptions, staging: Path, progress: Callable[[str], object]
) -> None:
    """Write ``<graph>.onnx`` beside the weights, which stay in their file, and where TensorRT is, ``<graph>.plan``.

    Raises:
        BuildError: a graph is not what the model says, or TensorRT cannot build it.
    """
    from kvforge.compiler.onnx_export import write_onnx

    for name in options.graphs:
        progress(f"export {name}")
        write_onnx(name, config, options, staging / RANK_DIR / f"{name}.onnx", staging / WEIGHTS_FILE)
    if builds_plans():
        from kvforge.compiler.tensorrt_build import build_plans

        build_plans(staging / RANK_DIR, options, progress)
