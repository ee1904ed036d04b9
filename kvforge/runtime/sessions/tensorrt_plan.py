"""One TensorRT plan in memory: torch CUDA tensors are its inputs and outputs, by address."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvforge.common.errors import EngineError
from kvforge.tensorrt.api import trt
from kvforge.tensorrt.installed import TITLES, flavour

DTYPES = {
    trt.DataType.FLOAT: torch.float32,
    trt.DataType.HALF: torch.float16,
    trt.DataType.BF16: torch.bfloat16,
    trt.DataType.FP8: torch.float8_e4m3fn,
    trt.DataType.INT8: torch.int8,
    trt.DataType.INT32: torch.int32,
    trt.DataType.INT64: torch.int64,
}


class PlanLogger(trt.ILogger):
    """Keeps TensorRT's last error."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.last_error = "no message"

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT, from any thread."""
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.last_error = msg.strip().splitlines()[0] if msg.strip() else "no message"


@functools.cache
def plan_logger() -> PlanLogger:
    """Return the one logger of this process: TensorRT for RTX keeps to the first that it is given."""
    return PlanLogger()


class Plan:
    """An engine of TensorRT with one execution context per optimisation profile, and where TensorRT records runs by
    itself one more for those that are repeated: steps of generated tokens, while ``is_repeated``.

    Contexts share the memory that the caller gives, ``workspace_bytes`` of it: runs of one session follow each other
    on one stream.
    """

    def __init__(self, path: Path, runtime: trt.Runtime, logger: PlanLogger) -> None:
        engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineError(
                f"{path} does not load in {TITLES[flavour().NAME]} {trt.__version__} on this GPU "
                f"({logger.last_error}); rebuild the engine here with kvforge build --target tensorrt."
            )
        self._path, self._logger, self._runtime = path, logger, runtime
        self._engine: trt.ICudaEngine = engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        modes = {name: engine.get_tensor_mode(name) for name in names}
        self.inputs = tuple(name for name in names if modes[name] == trt.TensorIOMode.INPUT)
        self.outputs = tuple(name for name in names if modes[name] == trt.TensorIOMode.OUTPUT)
        self.dtypes = {name: DTYPES.get(engine.get_tensor_dtype(name)) for name in names}
        self._ranges = [
            {name: engine.get_tensor_profile_shape(name, profile) for name in self.inputs}
            for profile in range(engine.num_optimization_profiles)
        ]
        self.workspace_bytes = max(
            engine.get_device_memory_size_for_profile_v2(profile) for profile in range(len(self._ranges))
        )
        self._makes_contexts = flavour().contexts(engine, path)
        self._contexts: list[trt.IExecutionContext] = []
        self._repeated: trt.IExecutionContext | None = None
        self.is_repeated = False

    def make_contexts(self, workspace: Tensor, stream: int) -> None:
        """Create the contexts in ``workspace`` (uint8, CUDA, at least ``workspace_bytes``), on a CUDA stream."""
        self._contexts = [self._start(profile, workspace, stream) for profile in range(len(self._ranges))]
        if flavour().RECORDS_RUNS:
            self._repeated = self._start(0, workspace, stream, repeated=True)

    def _start(self, profile: int, workspace: Tensor, stream: int, repeated: bool = False) -> "trt.IExecutionContext":
        context: trt.IExecutionContext | None = self._makes_contexts.make(repeated)
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise EngineError(f"{self._path} does not start ({self._logger.last_error}); free memory of the GPU.")
        context.set_device_memory(workspace.data_ptr(), workspace.numel())
        return context

    def keep_kernels(self) -> None:
        """Keep what was compiled for this GPU until now for the next start."""
        self._makes_contexts.keep()

    def largest(self, name: str, dim: int) -> int:
        """Return the largest size of a dimension of an input in any profile."""
        return max(int(ranges[name][2][dim]) for ranges in self._ranges)

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], stream: int, nothing: int) -> None:
        """Start one run on the stream; tensors must live until it has ended.

        All tensors are contiguous CUDA tensors; ``nothing`` is the address given for those without elements. An output
        that a plugin updates in place has its input's address.
        Raises EngineError when the sizes are beyond the plan's limits or TensorRT reports a failure.
        """
        profile = self.choose_profile({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        is_recorded = self.is_repeated and profile == 0 and self._repeated is not None
        context: trt.IExecutionContext = self._repeated if is_recorded else self._contexts[profile]
        done = True
        for name, tensor in inputs.items():
            done &= context.set_input_shape(name, tuple(tensor.shape))
        for name, tensor in (*inputs.items(), *outputs.items()):
            done &= context.set_tensor_address(name, tensor.data_ptr() or nothing)
        if not (done and context.execute_async_v3(stream)):
            raise EngineError(f"{self._path} failed ({self._logger.last_error}); restart, and rebuild if it repeats.")

    def choose_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the first profile that admits these input shapes; raises EngineError when none does."""
        for profile, ranges in enumerate(self._ranges):
            if all(
                len(shape) == len(ranges[name][2])
                and all(
                    low <= size <= high for low, size, high in zip(ranges[name][0], shape, ranges[name][2], strict=True)
                )
                for name, shape in shapes.items()
            ):
                return profile
        raise EngineError(f"{self._path} was not built for a step of this size ({dict(shapes)}); raise its limits.")
