"""The exported ONNX graphs in onnxruntime, unmodified, against the model in plain torch."""

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import plugins
from kvforge.compiler import onnx_export
from kvforge.compiler.export import ExportedGraph
from kvforge.compiler.onnx_export import write_onnx
from model_defs.graphs import LowerGraph, UpperGraph
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights
from tests.support.onnx.engine import CASES, ExportedEngine, OnnxCase, OnnxGraphs, empty_pools, export_case
from tests.support.onnx.tensorrt_support import unsupported
from tests.support.rounding import FEW_CODES, assert_near, codes_apart, model_error, turned_code_error
from tests.support.schedules.packed_steps import packed_steps

NUM_PAGES, TOKENS = 40, 61
EXACT = [name for name, case in CASES.items() if case.kv_dtype == "float32"]
EIGHT_BIT = [name for name in CASES if name not in EXACT]
LONG = ("static int8", "rotation in part, norms of branches")
BFLOAT16 = OnnxCase("qwen3", 1, 1, "fp8", "bfloat16", (("num_hidden_layers", 2), ("tie_word_embeddings", True)))
"""onnxruntime has no bfloat16 arithmetic; these graphs are checked, not run."""


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> ExportedEngine:
    """The export of a case."""
    name = request.param
    graphs = ("lower", "upper", "verify") if name == "swiftkv" else ("lower", "upper")
    return export_case(CASES.get(name, BFLOAT16), graphs)


def of(*names: str) -> pytest.MarkDecorator:
    """Runs a test on the exports of these cases."""
    return pytest.mark.parametrize("engine", names, indirect=True)


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in (61, 1, 38)]


@pytest.mark.with_full(engine=LONG)
@of(*EXACT)
def test_logits_equal_the_all_token_reference(engine: ExportedEngine) -> None:
    """Prompt chunks, mixed and decode steps, with the pools carried from step to step."""
    graphs, sequences = OnnxGraphs(engine), prompts(engine.config.vocab_size)
    weights = load_weights(engine.checkpoint)
    expected = [reference_logits(engine.config, weights, torch.tensor(tokens)) for tokens in sequences]
    all_kinds: set[str] = set()
    for seed in range(2):
        pools, kinds = empty_pools(engine, NUM_PAGES), set()
        for step in packed_steps(sequences, engine.options.page_size, NUM_PAGES, seed):
            hidden, pools = graphs.lower(step.lower.inputs, pools)
            logits = graphs.upper(step.upper(hidden).inputs, pools)
            assert logits.shape == (len(step.survivors), engine.config.vocab_size)
            sizes = [n for n in step.lower.query_start.diff().tolist() if n]
            kinds |= {"prefill" if min(sizes) > 1 else "decode" if max(sizes) == 1 else "mixed"}
            kinds |= set() if step.survivors else {"no survivors"}
            if step.survivors:
                want = torch.stack([expected[s][position] for s, position in step.survivors])
                assert_near(logits, want, model_error(engine.config, TOKENS), (seed, kinds))
        all_kinds |= kinds
    assert all_kinds == {"prefill", "decode", "mixed", "no survivors"}


def torch_graphs(engine: ExportedEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[LowerGraph, UpperGraph]:
    """The graphs in eager torch on the operators' references."""
    write, attend = (plugins.OPERATORS[name].reference for name in ("rope_paged_kv_write", "paged_attention"))

    def in_place(*tensors: Tensor, **numbers: float) -> tuple[Tensor, ...]:
        write(*tensors, **numbers)
        return tensors[5:]

    monkeypatch.setattr("model_defs.graphs.rope_paged_kv_write", in_place)
    monkeypatch.setattr("model_defs.layers.paged_attention", attend)
    weights = load_file(engine.weights)
    lower, upper = (graph(engine.config, engine.options.kv_scales) for graph in (LowerGraph, UpperGraph))
    for graph in (lower, upper):
        graph.load_state_dict({name: weights[name] for name in graph.state_dict() if name in weights})
    return lower.eval(), upper.eval()


@pytest.mark.with_full(engine=LONG)
@of(*EIGHT_BIT)
def test_8_bit_caches_equal_the_torch_graphs(engine: ExportedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all stored numbers are the same; one that is not is off by one step of its format.

    Each step starts from torch's pools: a number that rounds the other way must not be met again in later steps.
    """
    graphs, (lower, upper) = OnnxGraphs(engine), torch_graphs(engine, monkeypatch)
    pools = empty_pools(engine, NUM_PAGES)
    rounding = model_error(engine.config, TOKENS)
    turned = turned_code_error(pools[0][0].dtype, engine.config.head_dim)
    first_upper = len(engine.config.owners) - len(engine.config.upper_owners)
    for step in packed_steps(prompts(engine.config.vocab_size), engine.options.page_size, NUM_PAGES, 0):
        got_hidden, got_pools = graphs.lower(step.lower.inputs, pools)
        with torch.no_grad():
            hidden = lower(*step.lower.inputs, pools)
            logits = upper(*step.upper(hidden).inputs, pools[first_upper:])
        assert_near(got_hidden, hidden, rounding + turned)
        got_logits = graphs.upper(step.upper(hidden).inputs, pools)
        assert got_logits.shape == logits.shape
        if step.survivors:
            assert_near(got_logits, logits, rounding)
        slots = step.lower.slot_mapping.long()
        for got, want in zip(got_pools, pools, strict=True):
            for one, other in zip(got, want, strict=True):
                assert one.dtype == other.dtype
                one, other = (x.flatten(0, 1)[slots] for x in (one, other))
                if one.dtype == torch.float32:
                    assert_near(one, other, rounding + turned)
                    continue
                assert codes_apart(one, other).max() <= 1
                assert (one.float() != other.float()).float().mean() <= FEW_CODES


@of("swiftkv")
def test_the_verify_graph_runs(engine: ExportedEngine) -> None:
    from plugins.speculative_verify.cases import random_case as speculative_verify_case
    from tests.support.onnx.nodes import OnnxSession

    session = OnnxSession(str(engine.file("verify")))
    assert session.outputs == ["accepted", "next_token"]
    checked = 0
    for seed in range(200):
        logits, *others = speculative_verify_case(seed)
        vocab_size = engine.config.vocab_size
        if logits.shape[1] > vocab_size or not logits.shape[0]:
            continue
        padding = (0, vocab_size - logits.shape[1])
        logits = torch.nn.functional.pad(logits, padding, value=float("-inf"))
        others[2] = torch.nn.functional.pad(others[2], padding)
        got = session.run(dict(zip(session.inputs, (logits, *others), strict=True)))
        want = plugins.OPERATORS["speculative_verify"].reference(logits, *others)
        assert torch.equal(got["accepted"], want[0]) and torch.equal(got["next_token"], want[1]), seed
        checked += 1
    assert checked > 50


@pytest.mark.with_full(engine=LONG)
@of(*CASES, "bfloat16")
def test_tensorrt_supports_every_standard_node(engine: ExportedEngine) -> None:
    for file in sorted(engine.folder.glob("*.onnx")):
        model = onnx.load(file, load_external_data=False)
        assert unsupported(model) == [], file.name


@of("swiftkv")
def test_the_same_model_gives_the_same_bytes(engine: ExportedEngine, full: bool, tmp_path: Path) -> None:
    weights = Path(shutil.copy(engine.weights, tmp_path))
    for graph in ("lower", "upper", "verify") if full else ("lower",):
        again = tmp_path / f"{graph}.onnx"
        write_onnx(graph, engine.config, engine.options, again, weights)
        assert again.read_bytes() == engine.file(graph).read_bytes()


@of("qk norm, tied, int8")
def test_what_memory_held_before_changes_nothing(
    engine: ExportedEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Norms of one size, of which none has values when the graph is made, stay apart though their memory is equal."""
    export = onnx_export.export_lower

    def emptied(*args: Any, **kwargs: Any) -> ExportedGraph:
        graph = export(*args, **kwargs)
        for parameter in graph.program.parameters():
            parameter.data.zero_()
        return graph

    monkeypatch.setattr(onnx_export, "export_lower", emptied)
    again, weights = tmp_path / "lower.onnx", Path(shutil.copy(engine.weights, tmp_path))
    onnx_export.write_onnx("lower", engine.config, engine.options, again, weights)
    assert again.read_bytes() == engine.file("lower").read_bytes()


@of("swiftkv")
def test_files_hold_no_weights_and_no_paths(engine: ExportedEngine) -> None:
    names = set()
    for graph in ("lower", "upper", "verify"):
        content = engine.file(graph).read_bytes()
        for folder in (engine.folder, Path(plugins.__file__).parents[1], Path(torch.__file__).parent):
            assert str(folder).encode() not in content
        for tensor in onnx.load(engine.file(graph), load_external_data=False).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                assert entries["location"] == "weights.safetensors"
                names.add(tensor.name)
            else:
                assert len(tensor.raw_data) <= 64, tensor.name
    stored = load_file(engine.weights)
    assert names == stored.keys() - {"inverse_frequencies"}


def test_the_support_check_notices() -> None:
    text = """<ir_version: 10, opset_import: ["": 20, "kvforge": 1]>
        graph (float[n] x, int8[n] small, bool[n] mask, int64[k] axes) => (float[m] y, float[n] z, int8[n] w)
        {
            y = Compress (x, mask)
            z = ReduceMean (x, axes)
            w = Add (small, small)
            v = kvforge.Unknown (small)
        }"""
    problems = unsupported(onnx.parser.parse_model(text))
    assert len(problems) == 5, problems  # of Add, three tensors
    for operator, what in (("Compress", "not supported"), ("ReduceMean", "not constant"), ("Add", "small is INT8")):
        assert any(line.startswith(operator) and what in line for line in problems)
