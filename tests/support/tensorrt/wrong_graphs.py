"""Graphs that are deliberately wrong, given to the product's builder: what it says of each."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import onnx
from onnx import TensorProto, helper

from kvforge.common.errors import BuildError
from kvforge.compiler import tensorrt_build
from plugins.trt_plugin import InPlace, SymbolicTensor
from plugins.trt_plugins import PLUGINS
from plugins.trt_target import compile_for
from tests.support.tensorrt.claims import POLICIES, Claim
from tests.support.tensorrt.exports import export

GRAPH = "lower"
CLAIM = Claim(cut=2)
OBSERVING = Claim(cut=2, kv_policy="snapkv")
CHOOSING = Claim(cut=2, kv_policy=POLICIES["shadowkv"])


def sound(model: onnx.ModelProto) -> None:
    """Nothing is wrong."""


def no_hidden(model: onnx.ModelProto) -> None:
    model.graph.output.remove(next(output for output in model.graph.output if output.name == "hidden"))


def no_pool(model: onnx.ModelProto) -> None:
    model.graph.output.remove(next(output for output in model.graph.output if output.name == "v_pool_1_out"))


def another_output(model: onnx.ModelProto) -> None:
    product = next(node for node in model.graph.node if node.op_type == "Gemm")
    model.graph.output.append(helper.make_tensor_value_info(product.output[0], TensorProto.BFLOAT16, None))


def no_statistics(model: onnx.ModelProto) -> None:
    model.graph.output.remove(next(output for output in model.graph.output if output.name == "mass_0_out"))


def no_reconstruction(model: onnx.ModelProto) -> None:
    """The second layer's keys are those of the first."""
    first, second = (node for node in model.graph.node if node.op_type == "LowRankKeyReconstruct")
    place = next(node for node in model.graph.node if second.output[0] in node.input)
    place.input[0] = first.output[0]
    model.graph.node.remove(second)


def copied_places(model: onnx.ModelProto) -> None:
    """What attention reads is a copy of what the keys were placed in."""
    _copy(model, "v_pool_1_out")


def copied_pool(model: onnx.ModelProto) -> None:
    """The new pool is a copy of what the plugin wrote."""
    _copy(model, "k_pool_1_out")


def copied_statistics(model: onnx.ModelProto) -> None:
    """The new statistics are a copy of what the plugin wrote."""
    _copy(model, "mass_0_out")


def _copy(model: onnx.ModelProto, result: str) -> None:
    index, node = next((i, n) for i, n in enumerate(model.graph.node) if result in n.output)
    for other in model.graph.node:
        other.input[:] = ["written" if name == result else name for name in other.input]
    node.output[list(node.output).index(result)] = "written"
    model.graph.node.insert(index + 1, helper.make_node("Identity", ["written"], [result]))


def swapped_pools(model: onnx.ModelProto) -> None:
    """Two owners write each other's pools."""
    names = {"k_pool_0": "k_pool_1", "k_pool_1": "k_pool_0"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def wide_product(model: onnx.ModelProto) -> None:
    """A product of what was cast to float32, its result cast back."""
    index, product = next((i, n) for i, n in enumerate(model.graph.node) if n.op_type == "Gemm")
    casts = [helper.make_node("Cast", [name], [f"{name}_wide"], to=TensorProto.FLOAT) for name in product.input]
    result = product.output[0]
    product.input[:], product.output[:] = [f"{name}_wide" for name in product.input], [f"{result}_wide"]
    model.graph.node.insert(index + 1, helper.make_node("Cast", [f"{result}_wide"], [result], to=TensorProto.BFLOAT16))
    for cast in casts:
        model.graph.node.insert(index, cast)


def wide_weight(model: onnx.ModelProto) -> None:
    """A weight in float32, cast where it is used."""
    name = "layers.0.o.weight"
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    dims = list(weight.dims)
    model.graph.initializer.remove(weight)
    count = dims[0] * dims[1]
    model.graph.initializer.append(helper.make_tensor(f"{name}_wide", TensorProto.FLOAT, dims, [0.5] * count))
    model.graph.node.insert(0, helper.make_node("Cast", [f"{name}_wide"], [name], to=TensorProto.BFLOAT16))


GRAPHS: dict[str, Callable[[onnx.ModelProto], None]] = {
    function.__name__: function
    for function in (sound, no_hidden, no_pool, another_output, copied_pool, swapped_pools, wide_product, wide_weight)
}


def answer(trt: ModuleType, question: None) -> dict[str, str]:
    """What `ask_rtx` asks: what the builder says of the lower graph of `CLAIM` with each of `GRAPHS`, "built" where it
    is content; of a plugin that forgot that it writes in place; and of graphs that observe or choose chunks."""
    from kvforge.tensorrt import rtx

    rtx.register_plugins()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export(CLAIM, folder, [GRAPH])
        said = {name: _said(folder, CLAIM, damage) for name, damage in GRAPHS.items()}
        write = PLUGINS["RopePagedKvWrite"]
        outputs = write.outputs
        object.__setattr__(write, "outputs", lambda inputs, attributes: _as_new(inputs, outputs(inputs, attributes)))
        try:
            said["forgotten_alias"] = _said(folder, CLAIM, sound)
        finally:
            object.__setattr__(write, "outputs", outputs)
    for claim, damages in {
        OBSERVING: (no_statistics, copied_statistics),
        CHOOSING: (no_reconstruction, copied_places),
    }.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            export(claim, folder, [GRAPH])
            for damage in damages:
                said[damage.__name__] = _said(folder, claim, damage)
    return said


def _as_new(inputs: Any, outputs: tuple[Any, ...]) -> tuple[SymbolicTensor, ...]:
    return tuple(inputs[output.name] if isinstance(output, InPlace) else output for output in outputs)


def _said(folder: Path, claim: Claim, damage: Callable[[onnx.ModelProto], None]) -> str:
    """Stops before the plan is built where the network is refused."""
    model = onnx.load(folder / f"{GRAPH}.onnx", load_external_data=False)
    damage(model)
    file = folder / "damaged.onnx"
    file.write_bytes(model.SerializeToString())
    try:
        with compile_for(80), mock.patch.object(tensorrt_build, "check_report"):
            tensorrt_build.build_plan(GRAPH, file, folder / "damaged.plan", claim.options)
    except BuildError as error:
        return str(error)
    return "built"
