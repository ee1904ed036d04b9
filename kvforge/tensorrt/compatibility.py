"""Whether this machine's TensorRT and GPU can run plans that were built elsewhere."""

from pathlib import Path

from kvforge.common.errors import EngineError
from kvforge.common.extras import how_to_install
from kvforge.manifest import Manifest
from kvforge.tensorrt.installed import TITLES, flavour


def check_builder(manifest: Manifest, engine_dir: Path, version: str) -> None:
    """Check what the manifest says of the plans against the TensorRT that is imported; needs no GPU.

    ``version`` is TensorRT's. Plans of engines that do not say what built them are left to TensorRT.

    Raises:
        EngineError: they were built by another flavour, or another release.
    """
    builder = manifest.plan_builder
    if builder is None:
        return
    name = flavour().NAME
    if builder != name:
        raise EngineError(
            f"{engine_dir} has plans of {TITLES.get(builder, builder)}, and here {TITLES[name]} is used; install the "
            f"other with {how_to_install(builder)} in an environment without it, or rebuild the engine here."
        )
    if _release(manifest.plan_version or "") != _release(version):
        raise EngineError(
            f"{engine_dir} has plans of {TITLES[name]} {manifest.plan_version}, and this is {version}; install that "
            "release, or rebuild the engine here."
        )


def check_gpu(manifest: Manifest, engine_dir: Path, capability: tuple[int, int]) -> None:
    """Check the GPUs that the plans were built for, where the manifest says, against the one that is there, of the
    compute capability (major, minor). Plans of engines that do not say what built them are left to TensorRT.

    Raises:
        EngineError: they were built for others.
    """
    if manifest.plan_builder is None:
        return
    built_for = [tuple(map(int, each.split("."))) for each in manifest.plan_capabilities]
    if built_for and capability not in built_for and not (manifest.plan_is_portable and capability > min(built_for)):
        raise EngineError(
            f"{engine_dir} has plans for GPUs of compute capability {capabilities_of(manifest)}, and this one has "
            f"{capability[0]}.{capability[1]}; rebuild the engine for it, or use another GPU."
        )


def capabilities_of(manifest: Manifest) -> str:
    """Return the GPUs that the plans run on, in words."""
    return ", ".join(manifest.plan_capabilities) + (" and later" if manifest.plan_is_portable else "")


def _release(version: str) -> tuple[str, ...]:
    """What of a version plans depend on: major and minor."""
    return tuple(version.split(".")[:2])
