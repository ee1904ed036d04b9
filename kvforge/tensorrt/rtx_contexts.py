"""Execution contexts of TensorRT for RTX: how they record and specialise what they run, and kernels kept for the next
start."""

import contextlib
import logging
import re
from pathlib import Path

import tensorrt_rtx_bindings as trt
import torch

from kvforge.common.kept_file import write_kept

SUFFIX = ".kernels"
logger = logging.getLogger(__name__)


class RtxContexts:
    """Makes the contexts of one plan, which share a cache of the kernels that are compiled for this GPU.

    The cache lies beside the plan, a file for each kind of GPU; TensorRT refuses one of another release, driver or GPU,
    and then it is written anew.
    """

    def __init__(self, engine: trt.ICudaEngine, plan: Path) -> None:
        self._engine: trt.ICudaEngine = engine
        self._file = kernels_file(plan, torch.cuda.get_device_name())
        config: trt.IRuntimeConfig = self._engine.create_runtime_config()
        self._cache: trt.IRuntimeCache = config.create_runtime_cache()
        self._kept = b""
        with contextlib.suppress(FileNotFoundError):
            found = self._file.read_bytes()
            if self._cache.deserialize(found):
                self._kept = found

    def make(self, repeated: bool) -> "trt.IExecutionContext | None":
        """See ``kvforge.tensorrt.flavour.Contexts``. For repeated runs kernels of their sizes are compiled meanwhile;
        others have general ones, as their sizes do not come again soon."""
        config: trt.IRuntimeConfig = self._engine.create_runtime_config()
        graphs, kernels = trt.CudaGraphStrategy, trt.DynamicShapesKernelSpecializationStrategy
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if repeated else graphs.DISABLED
        config.dynamic_shapes_kernel_specialization_strategy = kernels.LAZY if repeated else kernels.NONE
        if not config.set_runtime_cache(self._cache):
            return None
        return self._engine.create_execution_context(config)

    def keep(self) -> None:
        """See ``kvforge.tensorrt.flavour.Contexts``; in a folder that cannot be written nothing is kept."""
        made = bytes(self._cache.serialize())
        if made == self._kept:
            return
        self._kept = made
        try:
            write_kept(self._file, made)
        except OSError as error:
            logger.warning("%s cannot be written (%s): each start compiles its kernels.", self._file, error.strerror)


def kernels_file(plan: Path, device: str) -> Path:
    """Return where the kernels of a plan are kept for GPUs of this name."""
    return plan.with_name(f"{plan.stem}.{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}{SUFFIX}")
