"""What an engine can be compiled for: one module per target, imported when it is chosen."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from kvforge.common.errors import BuildError
from kvforge.compiler.options import BuildOptions, ResolvedOptions
from kvforge.manifest import Manifest
from model_defs import ModelConfig

TARGETS = {
    "cpu": "this machine's CPU: C++ kernels and AOTInductor",
    "cuda": "an NVIDIA GPU: Triton kernels and AOTInductor",
    "tensorrt": "an NVIDIA GPU with TensorRT: ONNX, and plans where TensorRT or TensorRT for RTX is installed",
}
"""The targets' names, each with what it means."""

HOSTED = {"vllm": "an environment with vLLM: several GPUs, several machines"}
"""Targets of which nothing is compiled: another engine runs the checkpoint, behind the interface of ours."""

Progress = Callable[[str], object]


class Target(Protocol):
    """What a target's module offers."""

    BESIDE_WEIGHTS: bool
    """Whether ``write_graphs`` may run while the weights are written."""

    def check_toolchain(self, options: ResolvedOptions) -> None:
        """Raise BuildError when what the target needs to compile an engine with ``options`` is missing here."""

    def isa(self) -> tuple[str, ...]:
        """Return the architecture and the extensions that the compiled code will need."""

    def stages(self, graphs: tuple[str, ...]) -> tuple[str, ...]:
        """Return what ``write_graphs`` calls ``progress`` with for these graphs, in order."""

    def write_graphs(
        self, config: ModelConfig, options: ResolvedOptions, staging: Path, progress: Progress
    ) -> dict[str, Any] | None:
        """Write the compiled graphs and operators below ``staging``, where the weights lie already unless
        ``BESIDE_WEIGHTS``; return fields of the manifest that only this target has.

        Raises:
            BuildError: a graph is not what the model says, or cannot be compiled.
        """


class Hosted(Protocol):
    """What the module of one of the ``HOSTED`` offers."""

    def isa(self) -> tuple[str, ...]:
        """Return the architecture."""

    def stages(self) -> tuple[str, ...]:
        """Return what ``write_engine`` calls ``progress`` with between "read" and "manifest", in order."""

    def write_engine(
        self, checkpoint_path: Path, output: Path, options: BuildOptions, overwrite: bool, progress: Progress
    ) -> Manifest:
        """Write the whole engine.

        Raises:
            CheckpointError, BuildError: as ``kvforge.compiler.build_engine``.
        """


def load_target(name: str) -> Target:
    """Return the module of target ``name``; raises BuildError for an unknown one."""
    if name not in TARGETS:
        raise BuildError(f"Target {name!r} is not supported; supported: {', '.join((*TARGETS, *HOSTED))}.")
    return cast(Target, importlib.import_module(f"kvforge.compiler.targets.{name}"))


def load_hosted(name: str) -> Hosted:
    """Return the module of the target ``name`` of ``HOSTED``."""
    return cast(Hosted, importlib.import_module(f"kvforge.compiler.targets.{name}"))


def isa_of(name: str) -> tuple[str, ...]:
    """Return what code for target ``name`` needs; raises BuildError for an unknown one."""
    return load_hosted(name).isa() if name in HOSTED else load_target(name).isa()
