"""What the cuda target would compile, looked at on a machine without a GPU.

    python -m tests.support.cuda.offline lower:bfloat16 upper:fp8

Exports graphs of a small SwiftKV model on fake CUDA tensors, lets AOTInductor run its passes and stops before code
generation. Prints JSON: for each graph its kernels (name, arguments, grid, the input dimensions the grid depends on),
the kvforge operators that are left, the inputs that are copied to, and clones. Run it in a process of its own: it
tells torch and Triton that there is a GPU of compute capability 9.0.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from triton.backends.compiler import GPUTarget

from kvforge.common.errors import BuildError
from kvforge.compiler.aot_inductor import compile_package
from kvforge.compiler.export import EXPORTS, ExportedGraph
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from kvforge.compiler.pieces import cut_into_pieces
from model_defs import ModelConfig, load_config
from plugins import cuda_ops

MODEL = {
    "model_type": "llama_swiftkv",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "swiftkv": True,
    "num_key_value_layers": 2,
    "key_value_group_size": 2,
    "early_exit": True,
}

SHADOWKV = "shadowkv:rank=48,sparse_budget=256,num_outlier_chunks=4"

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


class OfflineDriver:
    """Tells Triton which GPU to compile for, as its driver would."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def pretend_gpu() -> None:
    """Make fake CUDA tensors traceable: a CPU build of torch lacks even the device guard that tracing asks for."""
    triton.runtime.driver.set_active(OfflineDriver())
    if torch.version.cuda is not None:
        return
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_GUARD)
        subprocess.run(
            f"g++ -std=c++20 -shared -fPIC -I{root}/include {source} -o {library} -L{root}/lib -lc10".split(),
            check=True,
        )
        ctypes.CDLL(str(library))


def export(name: str, config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
    """Export a graph on fake CUDA tensors; its parameters end up in the fake mode of its inputs."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = EXPORTS[name](config, options, "cuda")
    _pretend_weights(graph.program)
    return graph


def export_pieces(graph: ExportedGraph) -> list[ExportedGraph]:
    """Cut a graph that ``export`` returned; of pieces that are alike there is one."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        cut = cut_into_pieces(graph.program)
    assert cut is not None, "this graph can be cut"
    for program in cut.programs.values():
        _pretend_weights(program)
    return [ExportedGraph(name, program, ()) for name, program in cut.programs.items()]


def _pretend_weights(program: ExportedProgram) -> None:
    """Put a program's weights into the fake mode of its inputs."""
    mode = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder").fake_mode
    with mode:
        for store in (program.state_dict, program.constants):
            for key, old in list(store.items()):
                new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cuda")
                is_parameter = isinstance(old, torch.nn.Parameter)
                store[key] = torch.nn.Parameter(new, requires_grad=False) if is_parameter else new


def lowered(graph: ExportedGraph) -> Graph:
    """Return what AOTInductor would generate code for."""
    found: list[Graph] = []

    def stop(self: GraphLowering, *args: Any) -> None:
        found.append(self.module.graph)
        raise InterruptedError("the graph is seen")

    original, GraphLowering.run = GraphLowering.run, stop  # type: ignore[method-assign]
    try:
        compile_package(graph.program, Path("never-written.pt2"))
    except BuildError as error:
        if not found:
            raise error.__cause__ or error from None
    finally:
        GraphLowering.run = original  # type: ignore[method-assign]
    return found[0]


def describe(graph: ExportedGraph) -> dict[str, Any]:
    """Return the JSON of one graph."""
    nodes = [node for node in lowered(graph).nodes if node.op in ("placeholder", "call_function")]
    inputs = [node for node in nodes if node.op == "placeholder"]
    names = list(graph.program.graph_signature.user_inputs)[-len(inputs) :]
    sizes: dict[str, list[str]] = {}
    for name, node in zip(names, inputs, strict=True):
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(str(size.node.expr), []).append(f"{name}[{dim}]")
    calls = [node for node in nodes if node.op == "call_function"]
    name_of = dict(zip(inputs, names, strict=True))
    return {
        "kernels": [_kernel(node, sizes) for node in calls if "triton_kernel_wrapper" in str(node.target)],
        "operators": [str(node.target) for node in calls if str(node.target).startswith("kvforge")],
        "copies": [name_of.get(node.args[0], "?") for node in calls if _is_copy(node)],  # type: ignore[call-overload]
        "clones": [str(node) for node in calls if "clone" in str(node.target)],
    }


def _is_copy(node: Node) -> bool:
    """Whether a node copies to an input; of a copy to itself, left where several kernels updated it in place, Inductor
    makes nothing."""
    return "copy_" in str(node.target) and node.args[0] is not node.args[1]


def _kernel(node: Node, sizes: dict[str, list[str]]) -> dict[str, Any]:
    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    grid, depends = [], set()
    for entry in node.kwargs["grid"][0]:  # type: ignore[index,union-attr]
        value = entry.meta["val"] if isinstance(entry, Node) else entry
        grid.append(str(value))
        if isinstance(value, torch.SymInt):
            depends |= {place for symbol in value.node.expr.free_symbols for place in sizes[str(symbol)]}
    return {
        "name": kernel.__name__,
        "arguments": list(node.kwargs["kwargs"]),  # type: ignore[arg-type]
        "grid": grid,
        "depends": sorted(depends),
    }


def main() -> None:
    """Describe the graphs named on the command line, each as NAME:KV_DTYPE or NAME:shadowkv; as NAME:KV_DTYPE:LAYERS
    the pieces of a graph of so many layers, cut in the middle."""
    pretend_gpu()
    cuda_ops.register()
    report: dict[str, Any] = {}
    for argument in sys.argv[1:]:
        name, cache, *layers = argument.split(":")
        deep = {"num_hidden_layers": int(layers[0]), "num_key_value_layers": int(layers[0]) // 2} if layers else {}
        config = load_config(MODEL | deep)
        cached = {"kv_policy": SHADOWKV} if cache == "shadowkv" else {"kv_dtype": cache, "max_draft_len": 3}
        options = resolve(BuildOptions("cuda", **cached), config, "BF16")
        graph = export(name, config, options)
        verify(graph, config, options)
        report[argument] = [describe(piece) for piece in export_pieces(graph)] if layers else describe(graph)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
