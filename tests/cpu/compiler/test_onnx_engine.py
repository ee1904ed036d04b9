"""Engines of target tensorrt where TensorRT is not: their files, what is checked in them, and large weights."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper

from kvforge import cli
from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.onnx_check import check_graph
from kvforge.compiler.onnx_weights import external_tensors, use_external_weights
from kvforge.compiler.targets import tensorrt
from kvforge.manifest import WEIGHTS_FILE, load_manifest, verify_files
from tests.support.onnx.engine import ExportedEngine, OnnxCase, export_case

ROOT = Path(__file__).parents[3]


def test_an_engine_directory_without_tensorrt(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "builds_plans", lambda: False)
    engine, seen = tmp_path / "engine", []
    options = BuildOptions(target="tensorrt", kv_dtype="fp8", page_size=8, max_draft_len=2)
    manifest = build_engine(checkpoint, engine, options, progress=seen.append)
    assert seen == ["read", "weights", "export lower", "export upper", "export verify", "manifest"]
    assert load_manifest(engine) == manifest
    verify_files(engine, manifest)
    assert (manifest.target, manifest.isa, manifest.kv_dtype) == ("tensorrt", ("onnx",), "fp8")
    graphs = {f"rank0/{graph}.onnx" for graph in ("lower", "upper", "verify")}
    tokenizer = {name for name in manifest.files if name.startswith("tokenizer/")}
    assert "tokenizer/tokenizer.json" in tokenizer and set(manifest.files) == graphs | {WEIGHTS_FILE} | tokenizer
    lower = onnx.load(engine / "rank0/lower.onnx")  # finds the weights beside it
    assert {value.name for value in lower.graph.input} >= {"k_pool_0", "v_pool_0", "k_scales_0", "v_scales_0"}
    result = subprocess.run(
        [sys.executable, "-m", "kvforge", "generate", str(engine), "--prompt", "Hello"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "TensorRT" in result.stderr or "GPU" in result.stderr


def test_gpus_are_for_plans(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "builds_plans", lambda: False)
    elsewhere = "is for --target tensorrt; leave it out for"
    for target, message in (("tensorrt", "nothing here builds plans"), ("cpu", elsewhere), ("vllm", elsewhere)):
        with pytest.raises(BuildError, match=message):
            build_engine(checkpoint, tmp_path / "engine", BuildOptions(target, compute_capabilities="8.9"))


def test_a_failed_export_leaves_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise BuildError("no")

    monkeypatch.setattr("kvforge.compiler.onnx_export.write_onnx", fail)
    monkeypatch.setattr(tensorrt, "builds_plans", lambda: False)
    with pytest.raises(BuildError, match=r"^no$"):
        build_engine(checkpoint, tmp_path / "engine", BuildOptions(target="tensorrt"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_the_last_line_says_that_plans_are_missing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvforge.compiler.targets.tensorrt.builds_plans", lambda: False)
    monkeypatch.setattr("kvforge.compiler.onnx_export.write_onnx", lambda *arguments: arguments[3].touch())
    assert cli.main(["build", str(checkpoint), "-o", str(tmp_path / "engine"), "--target", "tensorrt"]) == 0
    assert capsys.readouterr().out.endswith(" s; ONNX only, kvforge doctor says what builds plans\n")


def test_missing_packages_are_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name))
    with pytest.raises(BuildError, match=r"needs onnxscript; install them with pip install -e '\.\[onnx\]'\.$"):
        build_engine(checkpoint, tmp_path / "engine", BuildOptions(target="tensorrt"))


@pytest.fixture(scope="module")
def small() -> ExportedEngine:
    """A model with one layer on each side of the cut and static scales."""
    case = OnnxCase("llama", 1, 1, "int8_static", model=(("num_hidden_layers", 2),))
    return export_case(case, ("lower",))


def of_type(model: onnx.ModelProto, name: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == name]


def swap_inputs(model: onnx.ModelProto) -> None:
    write = of_type(model, "RopePagedKvWrite")[0]
    write.input[5], write.input[6] = write.input[6], write.input[5]


def read_before_the_write(model: onnx.ModelProto) -> None:
    attend = of_type(model, "PagedAttention")[0]
    model.graph.node.remove(attend)
    attend.input[1], attend.input[2] = "k_pool_0", "v_pool_0"
    model.graph.node.insert(0, attend)


def read_what_was_before_the_write(model: onnx.ModelProto) -> None:
    attend = of_type(model, "PagedAttention")[0]
    attend.input[1], attend.input[2] = "k_pool_0", "v_pool_0"


def drop_a_write(model: onnx.ModelProto) -> None:
    model.graph.node.remove(of_type(model, "RopePagedKvWrite")[1])


def change_a_scale(model: onnx.ModelProto) -> None:
    attend = of_type(model, "PagedAttention")[0]
    next(attribute for attribute in attend.attribute if attribute.name == "v_scale").f *= 1.01


def drop_plugin_version(model: onnx.ModelProto) -> None:
    attend = of_type(model, "PagedAttention")[0]
    attend.attribute.remove(next(attribute for attribute in attend.attribute if attribute.name == "plugin_version"))


def drop_the_bodies(model: onnx.ModelProto) -> None:
    del model.functions[:]


def return_the_old_pool(model: onnx.ModelProto) -> None:
    model.graph.output[1].name = "k_pool_0"


def use_another_domain(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Gelu", ["hidden"], ["y"], domain="com.example"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_inputs, "takes .*, which are not the pools of one owner"),
        (read_before_the_write, "reads the cache of layer 0 before"),
        (read_what_was_before_the_write, "not the pools of one owner"),
        (drop_a_write, r"writes \[0\]; the model asks for \[0\] and \[0, 1\]"),
        (change_a_scale, "as the scales of layer 0"),
        (drop_plugin_version, "has the attributes"),
        (drop_the_bodies, "has no function body"),
        (return_the_old_pool, "returns the pools"),
        (use_another_domain, "is of the domain com.example"),
    ],
)
def test_a_wrong_graph_is_refused(damage: Callable, message: str, small: ExportedEngine) -> None:
    model = onnx.load(small.file("lower"), load_external_data=False)
    check_graph(model, "lower", small.config, small.options)
    damage(model)
    with pytest.raises(BuildError, match=message):
        check_graph(model, "lower", small.config, small.options)


def weights_and_model(path: Path, initializer: ir.TensorProtocol) -> tuple[Path, ir.Model]:
    write_safetensors(path, [TensorSpec("w", (2, 3), torch.float32)], lambda spec: torch.ones(spec.shape))
    value = ir.Value(name=initializer.name, const_value=initializer)
    graph = ir.Graph([], [], nodes=[], initializers=[value], opset_imports={"": 20}, name="lower")
    return path, ir.Model(graph, ir_version=10)


def test_weights_are_references_into_the_file(tmp_path: Path) -> None:
    path, model = weights_and_model(tmp_path / "weights.safetensors", ir.tensor(torch.zeros(2, 3).numpy(), name="w"))
    use_external_weights(model, path, torch.ones(4))
    value = model.graph.initializers["w"].const_value
    assert isinstance(value, ir.ExternalTensor) and value.numpy().tolist() == [[1.0] * 3] * 2
    assert value.location == "weights.safetensors" and path.stat().st_size == value.offset + value.length
    assert external_tensors(path)["w"].offset % 64 == 0


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path, model = weights_and_model(tmp_path / "weights.safetensors", ir.tensor(torch.zeros(3, 2).numpy(), name="w"))
    with pytest.raises(BuildError, match=r"Weight w is FLOAT \[3,2\] in the graph lower and FLOAT \[2,3\]"):
        use_external_weights(model, path, torch.ones(4))
    path, model = weights_and_model(path, ir.tensor(torch.zeros(4).numpy(), name="folded"))
    with pytest.raises(BuildError, match="Graph lower has the constant folded, which was computed from weights"):
        use_external_weights(model, path, torch.ones(4))


_LARGE = """
import json, resource, sys
from pathlib import Path
import torch
from kvforge.compiler.onnx_export import write_onnx
from kvforge.compiler.options import ResolvedOptions
from model_defs import load_config
from model_defs.weights import weight_specs

folder = Path(sys.argv[1])
config = load_config({"model_type": "llama", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192})
options = ResolvedOptions("tensorrt", "float32", "float32", 4, 64, 8192, 32)
header, end = {}, 0
for spec in weight_specs(config):
    begin, end = end, end + 4 * torch.Size(spec.shape).numel()
    header[spec.name] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": [begin, end]}
text = json.dumps(header).encode()
with open(folder / "weights.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)  # a hole: takes no space
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_onnx("lower", config, options, folder / "lower.onnx", folder / "weights.safetensors")
print(json.dumps([before * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def test_weights_beyond_two_gib_stay_outside_and_unread(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LARGE, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-2000:]
    before, peak = json.loads(result.stdout.splitlines()[-1])
    weights = (tmp_path / "weights.safetensors").stat().st_size
    assert weights > 5 << 30
    assert (tmp_path / "lower.onnx").stat().st_size < 1 << 20
    assert peak - before < 1 << 30
    model = onnx.load(tmp_path / "lower.onnx", load_external_data=False)
    offsets = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    assert max(int(entry["offset"]) for entry in offsets.values()) > 2 << 30
    assert all(entry["location"] == "weights.safetensors" for entry in offsets.values())
