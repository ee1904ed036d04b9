"""Compiling an exported graph to a CPU package with AOTInductor, weights left outside."""

from pathlib import Path

import torch
from torch.export import ExportedProgram

from kvforge.common.errors import BuildError, first_line

INDUCTOR_CONFIG = {
    "aot_inductor.package_constants_in_so": False,
    "cpp.dynamic_threads": True,
}


def compile_package(program: ExportedProgram, path: Path) -> None:
    """Write the AOTInductor package of ``program`` to ``path`` (``*.pt2``), without its weights.

    Raises:
        BuildError: code generation or the C++ compiler failed.
    """
    try:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=dict(INDUCTOR_CONFIG)
            )
    except Exception as error:
        raise BuildError(f"AOTInductor could not compile {path.stem}: {first_line(error)}") from error
