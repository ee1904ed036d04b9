"""Target ``cpu``: AOTInductor packages and the compiled C++ operators, for this machine."""

from collections.abc import Callable
from pathlib import Path

import plugins
from kvforge.common.errors import BuildError
from kvforge.common.hardware import cpu_isa
from kvforge.compiler.export import EXPORTS
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.package_cache import package_writer
from kvforge.compiler.pieces import PieceRule, programs_of
from kvforge.compiler.toolchain import check_compiler, check_paths
from kvforge.manifest import OPERATORS_FILE
from model_defs import ModelConfig
from plugins.build import build_library

BESIDE_WEIGHTS = True

PIECES = PieceRule(min_bytes=64 << 20, package_nodes=100)
"""A layer has some 30 nodes. A call takes up to 25 microseconds where weights pass through the caches."""


def check_toolchain(options: ResolvedOptions) -> None:
    """Raise BuildError when there is no C++ compiler, or when it cannot be given the folders of a build."""
    check_compiler()
    check_paths(spaces=True)


def isa() -> tuple[str, ...]:
    """Return the architecture and the vector extensions of this machine."""
    return cpu_isa()


def stages(graphs: tuple[str, ...]) -> tuple[str, ...]:
    """Return what ``write_graphs`` calls ``progress`` with for these graphs, in order."""
    parts = (f"{what} {name}" for name in reversed(graphs) for what in ("export", "check", "compile"))
    return ("operators", *parts, "link")


def write_graphs(
    config: ModelConfig, options: ResolvedOptions, staging: Path, progress: Callable[[str], object]
) -> None:
    """Write ``operators.so`` and the AOTInductor packages of each graph: that of ``lower``, mostly the largest, is the
    last, so that the C++ compiler works on the others while Inductor generates it.

    Raises:
        BuildError: a graph is not what the model says, or code generation or the C++ compiler failed.
    """
    progress("operators")
    try:
        build_library(staging / OPERATORS_FILE)
    except plugins.PluginError as error:
        raise BuildError(str(error)) from error
    with package_writer() as write_package:
        for name in reversed(options.graphs):
            progress(f"export {name}")
            graph = EXPORTS[name](config, options)
            progress(f"check {name}")
            verify(graph, config, options)
            progress(f"compile {name}")
            for program, file in programs_of(name, graph.program, staging, PIECES):
                write_package(program, file)
        progress("link")
