"""Writing the graphs of an engine as ONNX: standard operators, and ours as nodes with a function body.

A file runs in any ONNX runtime as it is. TensorRT takes its plugins for our nodes (``plugins.trt_plugins``). Pools are
inputs and outputs: ``k_pool_<owner>``, ``v_pool_<owner>``, for dynamic 8-bit formats ``k_scales_<owner>`` and
``v_scales_<owner>``, and those of the KV policy's that the graph reads; each that it writes goes out as ``<name>_out``.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass
from torch import Tensor

from kvforge.common.errors import BuildError, first_line
from kvforge.compiler.export import EXPORTS, ExportedGraph, export_lower, export_upper
from kvforge.compiler.onnx_check import check_graph
from kvforge.compiler.onnx_decompose import decomposed_by_node
from kvforge.compiler.onnx_nodes import translations
from kvforge.compiler.onnx_registry import registry_kept
from kvforge.compiler.onnx_simplify import simplify
from kvforge.compiler.onnx_weights import use_external_weights
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.trace import without_lines
from kvforge.tensorrt.graph_tensors import INPUTS, RESULTS, WRITTEN, policy_inputs, pool_names, role_of, rows_of
from model_defs import ModelConfig
from model_defs.graphs import LowerGraph, UpperGraph
from model_defs.rope import inverse_frequencies
from plugins.onnx_body import DOMAIN, OPSET
from plugins.onnx_node import Cache
from plugins.onnx_nodes import ONNX_NODES
from plugins.registration import functional_writes


class FunctionalLower(LowerGraph):
    """The lower graph without effects."""

    returns_pools = True


class FunctionalUpper(UpperGraph):
    """The upper graph without effects."""

    returns_pools = True


def write_onnx(name: str, config: ModelConfig, options: ResolvedOptions, path: Path, weights: Path) -> None:
    """Write the graph ``name``, one of ``EXPORTS``, to ``path``; ``weights``, in the same directory, is the file that
    holds the parameters, of which nothing is read. The same arguments give the same bytes.

    Raises:
        BuildError: a graph is not what the model says or does not pass ONNX's checker.
    """
    model = build_model(name, config, options, weights)
    ir.save(model, path)
    check_graph(onnx.load(path, load_external_data=False), name, config, options)
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BuildError(f"{path.name} does not pass ONNX's checker: {first_line(error)}") from error


def build_model(name: str, config: ModelConfig, options: ResolvedOptions, weights: Path) -> ir.Model:
    """Return the model that ``write_onnx`` writes."""
    with without_lines(), functional_writes(), warnings.catch_warnings():  # the first lets in one thread
        warnings.simplefilter("ignore", FutureWarning)
        if name == "lower":
            graph = export_lower(config, options, module_type=FunctionalLower)
        elif name == "upper":
            graph = export_upper(config, options, module_type=FunctionalUpper)
        else:
            graph = EXPORTS[name](config, options)
        program = _to_onnx(graph)
    model = program.model
    model.graph.name = name
    _name_values(model.graph, graph, options)
    _drop_untouched_pools(model, options)
    program.rename_axes(_axes(model.graph, name, options))
    for value in model.graph.inputs:
        if value.dtype == ir.DataType.UINT8:  # which TensorRT's plugins do not have
            value.dtype = ir.DataType.INT8
    use_external_weights(model, weights, inverse_frequencies(config.rope, config.head_dim))
    _attach_functions(model, options)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    return model


def _mark(parameters: Iterable[Tensor]) -> None:
    """Give every parameter bytes of its own: the optimizer merges small constants that hold the same, and what
    parameters without values hold is chance."""
    for number, parameter in enumerate(parameters):
        parameter.data.view(-1).view(torch.uint8)[:2] = torch.tensor(divmod(number, 256), dtype=torch.uint8)


def _to_onnx(graph: ExportedGraph) -> torch.onnx.ONNXProgram:
    _mark(graph.program.parameters())
    with _quiet(), registry_kept(), decomposed_by_node():
        program = torch.onnx.export(
            graph.program,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            custom_translation_table=translations(),
        )
    assert program is not None
    simplify(program.model)
    return program


def _name_values(graph: ir.Graph, exported: ExportedGraph, options: ResolvedOptions) -> None:
    pools = pool_names(exported.pool_owners, options.kv_dtype, options.policy)
    inputs = [*INPUTS[exported.name], *pools, *policy_inputs(exported.name, options.policy)]
    outputs = [*RESULTS[exported.name], *(f"{pool}{WRITTEN}" for pool in pools)]
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, label in zip(values, names, strict=True):
            value.name = label


def _drop_untouched_pools(model: ir.Model, options: ResolvedOptions) -> None:
    """Leave out as outputs the pools that the graph does not write, and as inputs those of the KV policy that it does
    not read."""
    graph = model.graph
    for value in list(graph.outputs):
        if _source(value) in graph.inputs:
            graph.outputs.remove(value)
    RemoveUnusedNodesPass()(model)
    of_policy = {pool.name for pool in options.policy.keeping.named_pools}
    for value in list(graph.inputs):
        if role_of(str(value.name)) in of_policy and not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)


def _source(value: ir.Value) -> ir.Value | None:
    """The value that is handed on as ``value``."""
    while (node := value.producer()) is not None and node.op_type == "Identity":
        (found,) = node.inputs
        assert found is not None
        value = found
    return value


def _axes(graph: ir.Graph, name: str, options: ResolvedOptions) -> dict[str, str]:
    """Map torch's names of dimensions to ours; a pool's only dynamic one counts rows. Inputs that nothing reads, for
    whose sizes torch takes the example's, get theirs here."""
    renamed: dict[str, str] = {}
    known = INPUTS[name] | policy_inputs(name, options.policy)
    for value in graph.inputs:
        assert value.shape is not None
        names = known.get(str(value.name)) or (rows_of(str(value.name), options.policy),)
        if not value.uses():
            value.shape = ir.Shape((*names, *value.shape[len(names) :]))
            continue
        symbols = [str(dim) for dim in value.shape if not isinstance(dim, int)]
        renamed |= dict(zip(symbols, names, strict=True))
    return renamed


def _attach_functions(model: ir.Model, options: ResolvedOptions) -> None:
    cache = {torch.float8_e4m3fn: Cache.E4M3, torch.int8: Cache.INT8}.get(options.torch_kv_dtype, Cache.FLOAT)
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    for operator in ONNX_NODES.values():
        if operator.name in used:
            function = ir.serde.deserialize_function(operator.body(cache))
            model.functions[function.identifier()] = function


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notes on packages that it does not need here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
