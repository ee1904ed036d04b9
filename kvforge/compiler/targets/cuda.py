"""Target ``cuda``: AOTInductor packages with the Triton operators inside, for the GPU of this machine."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME

from kvforge.common.errors import BuildError
from kvforge.compiler.aot_inductor import compile_package
from kvforge.compiler.export import EXPORTS
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.pieces import PieceRule, programs_of
from kvforge.compiler.toolchain import check_compiler, check_paths
from model_defs import ModelConfig
from plugins import PluginError, cuda_ops
from plugins.triton_cache import check_capability

BESIDE_WEIGHTS = False

PIECES = PieceRule(min_bytes=16 << 20, package_nodes=60)
"""A layer, some 30 nodes, takes six seconds to compile on a GPU machine, and a package twelve."""


def check_toolchain(options: ResolvedOptions) -> None:
    """Raise BuildError when there is no GPU that torch can use, or one without the cache's format, no Triton, no C++
    compiler or no CUDA toolkit, or a folder whose name torch cannot give to the compiler."""
    if not torch.cuda.is_available():
        raise BuildError(
            f"Target cuda compiles for the GPU of this machine, and torch {torch.__version__} sees none; build where "
            "the engine will run, with a CUDA build of torch, or choose --target cpu."
        )
    check_compiler()
    check_paths(spaces=False)
    if CUDA_HOME is None and not Path("/usr/include/cuda.h").is_file() and "CPATH" not in os.environ:
        raise BuildError(
            "AOTInductor compiles against CUDA's headers (cuda.h), and no CUDA toolkit was found; install one or set "
            "CUDA_HOME."
        )
    major, minor = torch.cuda.get_device_capability()
    try:
        check_capability(options.torch_kv_dtype, 10 * major + minor)
        cuda_ops.register()
    except PluginError as error:
        raise BuildError(str(error)) from error


def isa() -> tuple[str, ...]:
    """Return the compute capability of the current GPU, e.g. ``("sm_90",)``."""
    major, minor = torch.cuda.get_device_capability()
    return (f"sm_{major}{minor}",)


def stages(graphs: tuple[str, ...]) -> tuple[str, ...]:
    """Return what ``write_graphs`` calls ``progress`` with for these graphs, in order."""
    return tuple(f"{what} {name}" for name in graphs for what in ("export", "check", "compile"))


def write_graphs(
    config: ModelConfig, options: ResolvedOptions, staging: Path, progress: Callable[[str], object]
) -> None:
    """Write the AOTInductor packages of each graph, whose example parameters take the weights' size of GPU memory
    meanwhile.

    Raises:
        BuildError: a graph is not what the model says, or compilation failed.
    """
    for name in options.graphs:
        progress(f"export {name}")
        graph = EXPORTS[name](config, options, "cuda")
        progress(f"check {name}")
        verify(graph, config, options)
        progress(f"compile {name}")
        for program, file in programs_of(name, graph.program, staging, PIECES):
            compile_package(program, file)
        del graph
        torch.cuda.empty_cache()
