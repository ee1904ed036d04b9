"""What an engine can be compiled for: one module per target, imported when it is chosen."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from kvforge.common.errors import BuildError
from kvforge.compiler.options import ResolvedOptions
from model_defs import ModelConfig

TARGETS = {
    "cpu": "this machine's CPU: C++ kernels and AOTInductor",
    "cuda": "an NVIDIA GPU: Triton kernels and AOTInductor",
    "tensorrt": "an NVIDIA GPU with TensorRT: ONNX, and plans where TensorRT is installed",
}
"""The targets' names, each with what it means."""

Progress = Callable[[str], object]


class Target(Protocol):
    """What a target's module offers."""

    def check_toolchain(self) -> None:
        """Raise BuildError when what the target needs to compile is missing here."""

    def isa(self) -> tuple[str, ...]:
        """Return the architecture and the extensions that the compiled code will need."""

    def stages(self, graphs: tuple[str, ...]) -> tuple[str, ...]:
        """Return what ``write_graphs`` calls ``progress`` with for these graphs, in order."""

    def write_graphs(self, config: ModelConfig, options: ResolvedOptions, staging: Path, progress: Progress) -> None:
        """Write the compiled graphs and operators below ``staging``, where the weights lie already.

        Raises:
            BuildError: a graph is not what the model says, or cannot be compiled.
        """


def load_target(name: str) -> Target:
    """Return the module of target ``name``; raises BuildError for an unknown one."""
    if name not in TARGETS:
        raise BuildError(f"Target {name!r} is not supported; supported: {', '.join(TARGETS)}.")
    return cast(Target, importlib.import_module(f"kvforge.compiler.targets.{name}"))
