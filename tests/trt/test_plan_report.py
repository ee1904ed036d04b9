"""What is read of the builder's log, and which plans are refused for it. The lines are of TensorRT for RTX 1.7.1."""

from dataclasses import replace

import pytest

from kvforge.common.errors import BuildError
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.tensorrt_report import Layer, check_report, is_of_the_report, read_report

OPTIONS = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 8, 100, 1000, 32)
FORMAT = "Format: (Linear) Row major linear format"


def tensor(name: str, shape: str, dtype: str) -> str:
    return f"{{ Name: {name}, Dimensions: [{shape}], Strides: [1], StrideOrder: [0], Datatype: {dtype}, {FORMAT} }}"


GEMM = (
    f"Name: node_linear_myl1_2, LayerType: gemm, Inputs: [ {tensor('linear.1_6_myl1', '-1,64', 'BFloat16')}], "
    f"Constants: [ {tensor('layers.0.qkv.weight_myl1', '64,128', 'BFloat16')}, {tensor('alpha_myl1', '1', 'Float')}], "
    f"Outputs: [ {tensor('linear', '-1,128', 'BFloat16')}], TacticName: , StreamId: 0"
)
WRITE = (
    "Name: node_write [profile 1], LayerType: PluginV3, Inputs: [ { Name: k, Location: Device, Dimensions: [-1,2,16], "
    "Datatype: BFloat16, Format: Format not available due to dynamic shapes }, { Name: cos, Location: Device, "
    "Dimensions: [-1,8], Datatype: Float, Format: Format not available due to dynamic shapes }], Outputs: [ { Name: "
    "k_out, Location: Device, Dimensions: [-1,8,2,16], Datatype: BFloat16, Format: x }], TacticValue: 0x0"
)
SIZES = [
    "Total Device Persistent Memory: 16 bytes",
    "Total Activation Memory: 100 bytes",
    "Total Activation Memory: 300 bytes",
    "Total Weights Memory: 100000 bytes",
]
SAID = [*SIZES, f"Layers:\n{GEMM}\n{WRITE}\n\nI/O Tensors:\n Name: input_ids, IOMode: Input, DataType: Int32"]
REPORT = read_report(SAID, "lower")


def test_what_is_read() -> None:
    assert all(map(is_of_the_report, SAID))
    assert not any(map(is_of_the_report, ("Original: 100 layers", "Timing cache", "Engine generation completed")))
    assert REPORT.layers == (
        Layer("node_linear_myl1_2", "gemm", ("BFloat16", "BFloat16")),
        Layer("node_write [profile 1]", "PluginV3", ("BFloat16", "Float")),
    )
    assert (REPORT.weight_bytes, REPORT.activation_bytes, REPORT.persistent_bytes) == (100000, 300, 16)
    assert REPORT.to_json()["layers"] == {"PluginV3": 1, "gemm": 1}


def test_a_sound_plan() -> None:
    check_report(REPORT, "lower", OPTIONS, 99000, ["node_write"])


@pytest.mark.parametrize(
    ("report", "weight_bytes", "plugins", "message"),
    [
        (REPORT, 100001, [], "holds 100000 bytes of weights, and the network has 100001"),
        (replace(REPORT, weight_bytes=400000), 200000, [], "holds 400000 bytes of weights, and the network has 200000"),
        (REPORT, 99000, ["node_write", "node_attend"], "has no layer node_attend"),
        (
            replace(REPORT, layers=(*REPORT.layers, Layer("node_wide", "gemm", ("BFloat16", "Float")))),
            99000,
            [],
            "computes node_wide in Float, not in BFloat16",
        ),
        (
            replace(REPORT, layers=(Layer("__myl_FcAdd", "runtime_fusion", ("Half", "Half")),)),
            99000,
            [],
            "computes __myl_FcAdd in Half, not in BFloat16",
        ),
    ],
)
def test_a_wrong_plan_is_caught_by_name(report, weight_bytes: int, plugins: list[str], message: str) -> None:
    with pytest.raises(BuildError, match=rf"^The plan of lower {message}; "):
        check_report(report, "lower", OPTIONS, weight_bytes, plugins)


@pytest.mark.parametrize("said", [[], SIZES, SAID[1:], SAID[3:]])
def test_a_log_that_says_less_is_refused(said: list[str]) -> None:
    with pytest.raises(BuildError, match="is not described in the builder's log"):
        read_report(said, "lower")
