"""TensorRT plans from the ONNX files of an engine, in the flavour of TensorRT that is installed."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.common.errors import BuildError
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.tensorrt_network import check_network, plugin_layers, weight_bytes
from kvforge.compiler.tensorrt_profiles import PROFILES, input_ranges
from kvforge.compiler.tensorrt_report import check_report, is_of_the_report, read_report
from kvforge.manifest import PLANS_FILE
from kvforge.tensorrt.api import trt
from kvforge.tensorrt.installed import TITLES, flavour
from plugins.trt_plugin import NAMESPACE
from plugins.trt_plugins import rewrite_for_plugins
from plugins.trt_target import compile_for


class BuildLogger(trt.ILogger):
    """Keeps what TensorRT reports as an error or a warning, and what it says of what it built."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.said: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT, from any thread."""
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(msg)
        elif severity == trt.ILogger.Severity.WARNING:
            self.warnings.append(msg)
        elif is_of_the_report(msg):
            self.said.append(msg)


_loggers: list[BuildLogger] = []


class ProgressBars(trt.IProgressMonitor):
    """One bar per phase of the builder that is no part of another, removed when the phase ends; Ctrl-C stops the
    build."""

    def __init__(self) -> None:
        trt.IProgressMonitor.__init__(self)
        self._bars: dict[str, tqdm] = {}

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Called by TensorRT, from any thread."""
        if parent_phase is None:
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


def build_plans(
    rank_dir: Path, options: ResolvedOptions, progress: Callable[[str], object], split: bool = True
) -> dict[str, Any]:
    """Build ``<graph>.plan`` beside each ``<graph>.onnx`` of an engine; the plans hold the weights.

    ``progress`` is called with ``"build <graph>"``. With ``split``, attention is split-KV decode's two plugins.
    Returns the fields of the manifest that say what was built.

    Raises:
        BuildError: no GPU or one too old, an ONNX file that TensorRT does not take, a network that is not what the ONNX
            file says, or no kernel for a layer.
    """
    used, built, reports = flavour(), set(), {}
    capabilities = used.capabilities(options.compute_capabilities, options.torch_kv_dtype)
    used.register_plugins()
    for graph in options.graphs:
        progress(f"build {graph}")
        with _for_tensorrt(rank_dir / f"{graph}.onnx", split) as file, compile_for(*capabilities):
            built |= plugins_in(file)
            reports[graph] = build_plan(graph, file, rank_dir / f"{graph}.plan", options)
    (rank_dir.parent / PLANS_FILE).write_text(json.dumps(reports, indent=1))
    return {
        "plan_builder": used.NAME,
        "plan_version": trt.__version__,
        "plan_capabilities": tuple(f"{capability // 10}.{capability % 10}" for capability in capabilities),
        "plan_is_portable": used.is_portable(options.compute_capabilities),
        "plan_plugins": tuple(sorted(built)),
    }


@contextlib.contextmanager
def _for_tensorrt(file: Path, split: bool) -> Iterator[Path]:
    """The ONNX file as it is parsed: beside the original, because external weights are found relative to it."""
    if not split:
        yield file
        return
    import onnx

    model = onnx.load(file, load_external_data=False)
    rewrite_for_plugins(model)
    rewritten = file.with_suffix(".split.onnx")
    try:
        rewritten.write_bytes(model.SerializeToString())
        yield rewritten
    finally:
        rewritten.unlink(missing_ok=True)


def plugins_in(file: Path) -> set[str]:
    """Return the names of the plugins that an ONNX file asks for."""
    import onnx

    nodes = onnx.load(file, load_external_data=False).graph.node
    return {node.op_type for node in nodes if node.domain == NAMESPACE}


def build_plan(graph: str, file: Path, plan: Path, options: ResolvedOptions) -> dict[str, Any]:
    """Build one plan; plugins must be registered. Returns what is known of it, as JSON-ready data. Raises BuildError as
    ``build_plans`` does."""
    logger = build_logger()
    builder: trt.Builder = trt.Builder(logger)
    # Networks are strongly typed: every layer computes in the types of the ONNX file.
    network: trt.INetworkDefinition = builder.create_network(flavour().network_flags())
    parser: trt.OnnxParser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):  # finds the weights beside it
        found = [str(parser.get_error(index)) for index in range(parser.num_errors)]
        raise _failure(graph, found or logger.errors)
    used = flavour()
    if used.IS_CHECKED:
        check_network(network, graph, options)
    config: trt.IBuilderConfig = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if sys.stderr.isatty():
        config.progress_monitor = ProgressBars()
    for name in PROFILES:
        config.add_optimization_profile(_profile(builder, network, graph, options, name))
    finish = used.configure(config, options.compute_capabilities)
    if not used.build(builder, network, config, plan):
        raise _failure(graph, logger.errors)
    described: dict[str, Any] = {}
    if used.IS_CHECKED:
        report = read_report(logger.said, graph)
        check_report(report, graph, options, weight_bytes(network), plugin_layers(network))
        described |= report.to_json()
    finish()
    return {**described, "plan_bytes": plan.stat().st_size}


def build_logger() -> BuildLogger:
    """Return the one logger of this process, empty: TensorRT for RTX keeps to the first that it is given."""
    if not _loggers:
        _loggers.append(BuildLogger())
    for messages in (_loggers[0].errors, _loggers[0].warnings, _loggers[0].said):
        messages.clear()
    return _loggers[0]


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
        f"{TITLES[flavour().NAME]} {trt.__version__} did not build the graph {graph} ({reason}); "
        "use the TensorRT release that docs/tensorrt.md names, or a larger GPU."
    )
