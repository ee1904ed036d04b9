"""Which GPU the TensorRT plugins compile their kernels for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plugins.errors import PluginError
from plugins.triton_ptx import CAPABILITIES

FORWARD_COMPATIBLE = (80, 89)
"""PTX for these runs on every later GPU; from 9.0 on the compiler writes code for one architecture alone."""

_chosen: tuple[int, ...] | None = None


def nearest_capability(capability: int) -> int:
    """The compute capability (major * 10 + minor) to compile for, so that the code runs on a GPU of `capability`."""
    if capability in CAPABILITIES:
        return capability
    older = [known for known in FORWARD_COMPATIBLE if known <= capability]
    if not older:
        raise PluginError(
            f"The kernels need compute capability 8.0, and this GPU has {capability // 10}.{capability % 10}; "
            "use a newer GPU."
        )
    return older[-1]


def target_capabilities() -> tuple[int, ...]:
    """What `compile_for` says, else what this machine's GPU runs; raises PluginError without a GPU."""
    if _chosen is not None:
        return _chosen
    if not torch.cuda.is_available():
        raise PluginError("There is no GPU to compile the plugins for; build the engine on a machine that has one.")
    major, minor = torch.cuda.get_device_capability()
    return (nearest_capability(10 * major + minor),)


def target_capability() -> int:
    """The one of `target_capabilities` that a plugin of TensorRT 11 has its kernel for."""
    return target_capabilities()[-1]


@contextmanager
def compile_for(*capabilities: int) -> Iterator[None]:
    """Within the block, in all threads, plugins compile for `capabilities` (90: 9.0) and no GPU need be there."""
    global _chosen
    before, _chosen = _chosen, tuple(sorted({nearest_capability(capability) for capability in capabilities}))
    try:
        yield
    finally:
        _chosen = before
