"""TensorRT plans from the ONNX files of an engine; needs TensorRT and the GPU that the engine is for."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
from tqdm import tqdm

import plugins
from kvforge.common.errors import BuildError
from kvforge.common.tensorrt_api import trt
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.tensorrt_profiles import PROFILES, input_ranges
from plugins.build import cache_dir
from plugins.triton_cache import check_capability
from plugins.trt_plugins import register_plugins, rewrite_for_plugins
from plugins.trt_target import target_capability


class BuildLogger(trt.ILogger):
    """Keeps what TensorRT reports as an error."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT, from any thread."""
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(msg)


class ProgressBars(trt.IProgressMonitor):
    """One bar per phase of the builder, removed when the phase ends; Ctrl-C stops the build."""

    def __init__(self) -> None:
        trt.IProgressMonitor.__init__(self)
        self._bars: dict[str, tqdm] = {}

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Called by TensorRT, from any thread."""
        self._bars[phase_name] = tqdm(total=num_steps, desc=phase_name, leave=False, position=len(self._bars))

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Called by TensorRT; returns whether to go on."""
        try:
            if phase_name in self._bars:
                self._bars[phase_name].update(step + 1 - self._bars[phase_name].n)
        except KeyboardInterrupt:
            return False
        return True

    def phase_finish(self, phase_name: str) -> None:
        """Called by TensorRT."""
        if phase_name in self._bars:
            self._bars.pop(phase_name).close()


def check_gpu(options: ResolvedOptions | None = None) -> None:
    """Raise BuildError unless this machine has a GPU that can run engines (with these options)."""
    try:
        capability = target_capability()
        if options is not None:
            check_capability(options.torch_kv_dtype, capability)
    except plugins.PluginError as error:
        raise BuildError(str(error)) from None


def build_plans(
    rank_dir: Path, options: ResolvedOptions, progress: Callable[[str], object], split: bool = True
) -> None:
    """Build ``<graph>.plan`` beside each ``<graph>.onnx`` of an engine; the plans hold the weights.

    ``progress`` is called with ``"build <graph>"``. With ``split``, attention is split-KV decode's two plugins.

    Raises:
        BuildError: no GPU or one too old, an ONNX file that TensorRT does not take, or no kernel for a layer.
    """
    check_gpu(options)
    register_plugins()
    for graph in options.graphs:
        progress(f"build {graph}")
        with _for_tensorrt(rank_dir / f"{graph}.onnx", split) as file:
            build_plan(graph, file, rank_dir / f"{graph}.plan", options)


@contextlib.contextmanager
def _for_tensorrt(file: Path, split: bool) -> Iterator[Path]:
    """The ONNX file as it is parsed: beside the original, because external weights are found relative to it."""
    if not split:
        yield file
        return
    model = onnx.load(file, load_external_data=False)
    rewrite_for_plugins(model)
    rewritten = file.with_suffix(".split.onnx")
    try:
        rewritten.write_bytes(model.SerializeToString())
        yield rewritten
    finally:
        rewritten.unlink(missing_ok=True)


def build_plan(graph: str, file: Path, plan: Path, options: ResolvedOptions) -> None:
    """Build one plan; plugins must be registered. Raises BuildError as ``build_plans`` does."""
    logger = BuildLogger()
    builder: trt.Builder = trt.Builder(logger)
    # TensorRT 11 networks are strongly typed: every layer computes in the types of the ONNX file.
    network: trt.INetworkDefinition = builder.create_network(
        1 << int(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS)
    )
    parser: trt.OnnxParser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):  # finds the weights beside the file
        found = [str(parser.get_error(index)) for index in range(parser.num_errors)]
        raise _failure(graph, found or logger.errors)
    config: trt.IBuilderConfig = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.progress_monitor = ProgressBars()
    for name in PROFILES:
        config.add_optimization_profile(_profile(builder, network, graph, options, name))
    cache = _timing_cache(config)
    serialized: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    if serialized is None:
        raise _failure(graph, logger.errors)
    plan.write_bytes(serialized)
    _save_timing_cache(cache)


def timing_cache_file() -> Path:
    """Where measured kernel times are kept between builds on this kind of GPU."""
    return cache_dir() / f"tensorrt-{trt.__version__}-sm{target_capability()}.timing"


def _timing_cache(config: trt.IBuilderConfig) -> trt.ITimingCache:
    """The cache as it was saved, or an empty one where it is missing, damaged or of another device."""
    file = timing_cache_file()
    for data in ([file.read_bytes()] if file.is_file() else []) + [b""]:
        cache: trt.ITimingCache | None = config.create_timing_cache(data)
        if cache is not None and config.set_timing_cache(cache, False):
            return cache
    raise BuildError(f"TensorRT {trt.__version__} makes no timing cache; free memory and build again.")


def _save_timing_cache(cache: trt.ITimingCache) -> None:
    file = timing_cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(cache.serialize())
    os.replace(temporary.name, file)


def _profile(
    builder: trt.Builder, network: trt.INetworkDefinition, graph: str, options: ResolvedOptions, name: str
) -> trt.IOptimizationProfile:
    profile: trt.IOptimizationProfile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor: trt.ITensor = network.get_input(index)
        try:
            ranges = input_ranges(graph, tensor.name, tuple(tensor.shape), options, name)
        except ValueError as error:
            raise BuildError(
                f"The ONNX file of {error}; write it again with kvforge build --target tensorrt."
            ) from None
        profile.set_shape(
            tensor.name,
            tuple(r.minimum for r in ranges),
            tuple(r.optimum for r in ranges),
            tuple(r.maximum for r in ranges),
        )
    return profile


def _failure(graph: str, messages: list[str]) -> BuildError:
    reason = messages[0].strip().splitlines()[0] if messages and messages[0].strip() else "no message"
    return BuildError(
        f"TensorRT {trt.__version__} did not build the graph {graph} ({reason}); "
        "use the TensorRT release that docs/tensorrt.md names, or a larger GPU."
    )
