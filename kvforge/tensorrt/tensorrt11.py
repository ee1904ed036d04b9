"""TensorRT 11: builds on the GPU that will run the plan, and takes the plugins' kernels into it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvforge.common.errors import BuildError, MissingToolError, first_line
from kvforge.common.extras import how_to_install
from kvforge.common.kept_file import write_kept
from kvforge.tensorrt.flavour import Contexts
from plugins.build import cache_dir
from plugins.errors import PluginError
from plugins.triton_cache import check_capability
from plugins.trt_plugins import register_plugins as _register_plugins
from plugins.trt_target import target_capability

if TYPE_CHECKING:
    import tensorrt as trt

NAME = "tensorrt"
IS_CHECKED = False
RECORDS_RUNS = False


def load() -> Any:
    """Return the module ``tensorrt``; raises MissingToolError where it cannot be imported."""
    try:
        import tensorrt
    except (ImportError, OSError) as error:
        raise MissingToolError(
            f"TensorRT cannot be imported ({first_line(error)}); on a machine with an NVIDIA GPU install it with "
            f"{how_to_install('tensorrt')}, or work in NVIDIA's TensorRT container."
        ) from error
    return tensorrt


def capabilities(asked: str, kv_dtype: torch.dtype) -> tuple[int, ...]:
    """Return the compute capability of this machine's GPU, as ``Flavour.capabilities`` says."""
    if asked not in ("auto", "current"):
        raise BuildError(
            "TensorRT 11 builds for the GPU that is there; leave --compute-capabilities out, or build where TensorRT "
            "for RTX is installed instead."
        )
    try:
        capability = target_capability()
        check_capability(kv_dtype, capability)
    except PluginError as error:
        raise BuildError(str(error)) from None
    return (capability,)


def is_portable(asked: str) -> bool:
    """Return False: a plan is for the GPU that it was built on."""
    return False


def register_plugins() -> None:
    """Make the plugins known in this process."""
    _register_plugins()


def network_flags() -> int:
    """Return the flags of a network whose plugins have their kernels in the plan; networks are strongly typed."""
    return 1 << int(load().NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS)


class TensorRT11Contexts:
    """Makes contexts; kernels are compiled in the plan."""

    def __init__(self, engine: "trt.ICudaEngine") -> None:
        self._engine: trt.ICudaEngine = engine

    def make(self, repeated: bool) -> "trt.IExecutionContext | None":
        """See ``kvforge.tensorrt.flavour.Contexts``."""
        return self._engine.create_execution_context(load().ExecutionContextAllocationStrategy.USER_MANAGED)

    def keep(self) -> None:
        """Nothing."""


def contexts(engine: "trt.ICudaEngine", plan: Path) -> Contexts:
    """Return what makes contexts of a plan."""
    return TensorRT11Contexts(engine)


def configure(config: "trt.IBuilderConfig", asked: str) -> Callable[[], None]:
    """Give the builder the times that it measured on this kind of GPU; the result keeps them."""
    cache = _timing_cache(config)
    return lambda: write_kept(timing_cache_file(), bytes(cache.serialize()))


def build(builder: "trt.Builder", network: "trt.INetworkDefinition", config: "trt.IBuilderConfig", plan: Path) -> bool:
    """Build a plan and write it to a file; returns whether there is one."""
    serialized: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    if serialized is None:
        return False
    plan.write_bytes(serialized)
    return True


def timing_cache_file() -> Path:
    """Return where measured kernel times are kept between builds on this kind of GPU."""
    return cache_dir() / f"tensorrt-{load().__version__}-sm{target_capability()}.timing"


def _timing_cache(config: "trt.IBuilderConfig") -> "trt.ITimingCache":
    """The cache as it was saved, or an empty one where it is missing, damaged or of another device."""
    file = timing_cache_file()
    for data in ([file.read_bytes()] if file.is_file() else []) + [b""]:
        cache: trt.ITimingCache | None = config.create_timing_cache(data)
        if cache is not None and config.set_timing_cache(cache, False):
            return cache
    raise BuildError(f"TensorRT {load().__version__} makes no timing cache; free memory and build again.")
