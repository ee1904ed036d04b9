"""ONNX graphs with a KV policy compute what the graphs in torch do: hidden states, logits, caches and what the policy
keeps, layer by layer in one memory."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import plugins
from kvforge.common.errors import BuildError
from kvforge.compiler.onnx_check import check_graph
from kvforge.kv_policies import OwnerCache
from kvforge.tensorrt.graph_tensors import INPUTS, policy_inputs, pool_names
from model_defs.graphs import LowerGraph, UpperGraph
from tests.support.onnx.engine import ExportedEngine, OnnxCase, export_case
from tests.support.onnx.nodes import OnnxSession
from tests.support.rounding import FEW_CODES, assert_near, codes_apart, model_error, turned_code_error

PAGE_SIZE, PAGES, STATE_PAGES = 8, 9, 8
QUERIES, BEFORE = (5, 1, 7, 2), (0, 9, 3, 20)
"""Tokens of each sequence in the step, and those that are cached before."""

CASES = {
    "a cut, shared caches": OnnxCase("llama", 2, 2, model=(("num_hidden_layers", 5),), policy="snapkv:budget=48"),
    "all layers": OnnxCase("qwen3", model=(("num_hidden_layers", 2),), policy="h2o:budget=48"),
    "squares, int8": OnnxCase("llama", None, 1, "int8", model=(("num_hidden_layers", 2),), policy="roco"),
    "counts": OnnxCase("llama", 1, 2, model=(("num_hidden_layers", 3),), policy="scissorhands"),
    "chunks": OnnxCase(
        "llama",
        1,
        2,
        model=(("num_hidden_layers", 4),),
        policy="shadowkv:rank=8,chunk_size=8,sparse_budget=16,num_outlier_chunks=1,num_local_tokens=8",
    ),
    "no operator": OnnxCase("llama", 1, model=(("num_hidden_layers", 2),), policy="streaming:budget=48"),
}


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest) -> ExportedEngine:
    return export_case(CASES[request.param])


@pytest.fixture
def graphs(engine: ExportedEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[LowerGraph, UpperGraph]:
    """The graphs in eager torch on the operators' references."""
    references = {name: operator.reference for name, operator in plugins.OPERATORS.items()}

    def write(*tensors: Tensor, k_scale: float, v_scale: float, rotates_keys: bool) -> tuple[Tensor, ...]:
        scales = () if len(tensors) > 7 else (None, None)
        references["rope_paged_kv_write"](*tensors, *scales, k_scale, v_scale, rotates_keys)
        return tensors[5:]

    def observe(*arguments: Any) -> tuple[Tensor, ...]:
        references["attention_mass"](*arguments)
        return tuple(states for states in arguments[10:12] if states is not None)

    def update(selected: Tensor, cached: Tensor, counts: Tensor, slot: Tensor) -> tuple[Tensor, ...]:
        return (*references["chunk_cache_update"](selected, cached, counts, slot), cached, counts)

    def bring(*arguments: Any) -> tuple[Tensor, ...]:
        references["selected_kv_write"](*arguments)
        return arguments[-2:]

    monkeypatch.setattr("model_defs.chunk_selection.landmark_select", references["landmark_select"])
    monkeypatch.setattr("model_defs.chunk_selection.updated_chunks", update)
    monkeypatch.setattr("model_defs.chunk_selection.selected_kv_write", bring)
    monkeypatch.setattr("model_defs.graphs.rope_paged_kv_write", write)
    monkeypatch.setattr("model_defs.cache_observation.attention_mass", observe)
    monkeypatch.setattr("model_defs.layers.paged_attention", plugins.OPERATORS["paged_attention"].reference)
    return graphs_of(engine)


def graphs_of(engine: ExportedEngine) -> tuple[LowerGraph, UpperGraph]:
    """The graphs in eager torch."""
    weights, made = load_file(engine.weights), []
    for kind in (LowerGraph, UpperGraph):
        graph = kind(engine.config, engine.options.kv_scales, engine.options.policy.insertion.layer_insertion())
        graph.load_state_dict({name: weights[name] for name in graph.state_dict() if name in weights}, strict=False)
        made.append(graph.eval())
    return made[0], made[1]


def step_inputs(engine: ExportedEngine) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A step's tensors, and the policy's: the third sequence is not observed, the second has statistics already."""
    lengths = [new + old for new, old in zip(QUERIES, BEFORE, strict=True)]
    columns, free = 4, torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.zeros(len(lengths), columns, dtype=torch.int32)
    state = torch.full_like(table, -1)
    positions, slots = [], []
    for s, (length, old) in enumerate(zip(lengths, BEFORE, strict=True)):
        pages = [free.pop() for _ in range(-(-length // PAGE_SIZE))]
        table[s, : len(pages)] = torch.tensor(pages)
        for position in range(old, length):
            positions.append(position)
            slots.append(pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
    state[0, :1], state[1, :2], state[3, :3] = torch.tensor([5]), torch.tensor([1, 7]), torch.tensor([0, 2, 3])
    ints = (torch.arange(3, 3 + len(positions)), torch.tensor(positions), torch.tensor(slots))
    starts = torch.tensor([0, *QUERIES]).cumsum(0)
    step = (*(x.int() for x in (*ints, starts, torch.tensor(lengths))), table)
    if is_chunked(engine):  # two sequences whose prompts are factored
        shadow = torch.tensor([[0, 0, 0], [4, 1, 6], [0, 0, 0], [2, 7, 0]]).int()
        numbers = (torch.tensor(x).int() for x in ([-1, 2, -1, 0], [0, 3, 0, 2], [0, 2, 0, 1]))
        slot, num_chunks, num_selected = numbers
        return step, (slot, shadow, num_chunks, num_selected)
    more = (state, torch.tensor([3, 1, 0, 2]).int(), torch.tensor([0, 9, 0, 0]).int())
    return step, more if engine.options.policy.keeping.state_inputs else ()


def is_chunked(engine: ExportedEngine) -> bool:
    return engine.options.policy.name == "shadowkv"


def some_pools(engine: ExportedEngine) -> list[tuple[Tensor, ...]]:
    config, options = engine.config, engine.options
    generator = torch.Generator().manual_seed(2)
    pools = []
    for _ in config.owners:
        slots = (PAGES, PAGE_SIZE, config.num_kv_heads)
        cache = [torch.randn(*slots, config.head_dim, generator=generator) for _ in range(2)]
        if options.has_scale_pools:
            cache = [(20 * one).clamp(-127, 127).round().to(torch.int8) for one in cache]
            cache += [torch.rand(slots, generator=generator) / 50 for _ in range(2)]
        states = [torch.rand(STATE_PAGES, *slots[1:], generator=generator) for _ in options.policy.keeping.named_pools]
        if is_chunked(engine):
            rows = {"pages": STATE_PAGES, "sequences": len(QUERIES)}
            sizes = OwnerCache(slots[2], config.head_dim, PAGE_SIZE, 32)
            states = [
                torch.zeros(rows[pool.rows], *pool.shape, dtype=getattr(torch, pool.dtype))
                if pool.dtype
                else torch.randn(rows[pool.rows], *pool.shape, generator=generator)
                for pool in options.policy.keeping.state_pools(sizes)
            ]
            states[4].fill_(-1)
            states[4][2, :, 1] = 1  # a chunk that is there already
        pools.append((*cache, *states))
    return pools


def test_a_step(engine: ExportedEngine, graphs: tuple[LowerGraph, UpperGraph]) -> None:
    check_a_step(engine, graphs)


def test_a_step_of_the_cpu_kernels(engine: ExportedEngine) -> None:
    """The operators are those that engines of target cpu call."""
    plugins.load_library()
    check_a_step(engine, graphs_of(engine))


def test_each_attention_on_chunks_follows_keys_that_are_rebuilt_by_a_node_of_their_own(engine: ExportedEngine) -> None:
    for graph, layers in (("lower", engine.config.cut), ("upper", engine.config.num_layers - engine.config.cut)):
        nodes = onnx.load(engine.file(graph), load_external_data=False).graph.node
        keys = [node.output[0] for node in nodes if node.op_type == "LowRankKeyReconstruct"]
        assert len(keys) == (layers if is_chunked(engine) else 0)
        assert keys == [node.input[0] for node in nodes if node.op_type == "SelectedKvPlace"]


def check_a_step(engine: ExportedEngine, graphs: tuple[LowerGraph, UpperGraph]) -> None:
    config, options = engine.config, engine.options
    step, state = step_inputs(engine)
    want, before = some_pools(engine), some_pools(engine)
    survivors = torch.tensor([2, 3, 4, 5, 13, 14]).int()
    survivor_start = torch.tensor([0, 3, 4, 4, 6]).int()
    with torch.no_grad():
        hidden = graphs[0](*step, want, *((state,) if state else ()))
    given = dict(zip((*INPUTS["lower"], *policy_inputs("lower", options.policy)), (*step, *state), strict=True))
    names = pool_names(config.owners, options.kv_dtype, options.policy)
    flat = (as_plugins_have_it(tensor) for pool in before for tensor in pool)
    memory = dict(zip(names, flat, strict=True))
    session = OnnxSession(str(engine.file("lower")))
    result = session.run(given | memory)
    check_same(engine, result.pop("hidden"), hidden)
    taken(memory, result)
    compare(engine, memory, want, names)
    above = [pool for owner, pool in zip(config.owners, want, strict=True) if owner in config.owners_above]
    upper_step = (hidden, survivors, survivor_start, *(step[index] for index in (1, 4, 5)))
    if state and not is_chunked(engine):  # the same tokens are observed above the cut, of those that survive
        state = (state[0], torch.tensor([3, 1, 0, 2]).int(), state[2])
    with torch.no_grad():
        logits = graphs[1](*upper_step, above, *((state,) if state else ()))
    given = dict(zip((*INPUTS["upper"], *policy_inputs("upper", options.policy)), (*upper_step, *state), strict=True))
    result = OnnxSession(str(engine.file("upper"))).run(given | memory)
    check_same(engine, result.pop("logits"), logits)
    taken(memory, result)
    compare(engine, memory, want, names)
    observes = bool(options.policy.insertion.operators)
    last = -2 if is_chunked(engine) else -1
    changed = [not torch.equal(one[last], other[last]) for one, other in zip(want, some_pools(engine), strict=True)]
    assert changed == [observes] * len(want)


def taken(memory: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    """What a graph gives stands in the memory then."""
    assert {name.removesuffix("_out") for name in written} <= memory.keys()
    memory |= {name.removesuffix("_out"): tensor for name, tensor in written.items()}


def compare(
    engine: ExportedEngine, memory: dict[str, Tensor], want: list[tuple[Tensor, ...]], names: list[str]
) -> None:
    for name, expected in zip(names, (tensor for pool in want for tensor in pool), strict=True):
        check_same(engine, memory[name], as_plugins_have_it(expected))


def as_plugins_have_it(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int8) if tensor.dtype == torch.uint8 else tensor


def check_same(engine: ExportedEngine, got: Tensor, want: Tensor) -> None:
    """Whole numbers are equal, but for a few codes of an 8-bit cache; all others are the same but for rounding."""
    assert got.dtype == want.dtype
    codes = engine.options.torch_kv_dtype
    if got.dtype == codes == torch.int8:
        apart = codes_apart(got, want)
        assert apart.max() <= 1 and (apart > 0).float().mean() <= FEW_CODES
    elif got.dtype.is_floating_point:
        turned = turned_code_error(codes, engine.config.head_dim) if codes == torch.int8 else 0
        assert_near(got, want, model_error(engine.config, max(QUERIES) + max(BEFORE)) + turned)
    else:
        assert torch.equal(got, want)


def test_a_statistic_of_another_layer_is_refused(engine: ExportedEngine) -> None:
    model = onnx.load(engine.file("lower"), load_external_data=False)
    check_graph(model, "lower", engine.config, engine.options)
    observers = [node for node in model.graph.node if node.op_type.startswith(("AttentionMass", "ChunkCache"))]
    if not observers:
        assert not engine.options.policy.insertion.operators
        return
    model.graph.node.remove(observers[-1])
    with pytest.raises(BuildError, match=r"node .* (follows \[|takes \[)|returns the pools"):
        check_graph(model, "lower", engine.config, engine.options)


def test_files_name_no_folder(engine: ExportedEngine) -> None:
    for graph in ("lower", "upper"):
        assert str(Path(plugins.__file__).parents[1]).encode() not in engine.file(graph).read_bytes()
