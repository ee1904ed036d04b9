"""Exporting the graphs with every step dimension dynamic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kvforge.common.dtypes import torch_specs
from kvforge.compiler.cpu_graph import pack_linears
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.trace import trace
from kvforge.costs.cache_layout import CacheLayout
from kvforge.kv_policies import Full
from model_defs import ModelConfig
from model_defs.draft_graph import head_buffers
from model_defs.draft_head import DraftHead
from model_defs.graphs import EarlyExitGraph, LowerGraph, UpperGraph, VerifyGraph
from model_defs.head_kinds import HEAD_CODE
from model_defs.predict_graph import PredictGraph, frequencies_of
from model_defs.rope import frequency_buffer, inverse_frequencies, rope_tables
from model_defs.weights import FLOAT32

Graph = TypeVar("Graph", LowerGraph, UpperGraph)

# Example sizes are pairwise different and not 0 or 1, so that no two dimensions are taken for one.
_TOKENS, _SEQUENCES, _SURVIVORS, _COLUMNS, _PAGES, _DRAFTS = 24, 3, 5, 7, 11, 6
_STATE_COLUMNS, _STATE_PAGES, _SLOTS, _EXACT_PAGES, _LOGITS, _STATES = 9, 13, 4, 17, 2, 19


@dataclass(frozen=True)
class ExportedGraph:
    """An exported graph and the owner layers whose pools are its last inputs, in order, but for the KV policy's
    ``state_inputs`` and what ``past_cut_example`` gives, or the pools that ``state_operators`` take and
    ``rows_example``; ``written`` are those whose pools it writes."""

    name: str
    program: ExportedProgram
    pool_owners: tuple[int, ...]
    written: tuple[int, ...] = ()
    state_operators: tuple[str, ...] = ()

    @property
    def num_past_cut(self) -> int:
        """How many inputs ``past_cut_example`` gives."""
        return 2 if self.name == "upper" and self.written else 0

    @property
    def num_behind(self) -> int:
        """How many inputs are behind the owners' pools that are no KV policy's."""
        return len(self.state_operators) + self.num_rows if self.state_operators else self.num_past_cut

    @property
    def num_rows(self) -> int:
        """How many inputs say which rows of states the step reads and writes."""
        return 2 if self.name == "lower" else 1


def uninitialised(module: nn.Module, config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> nn.Module:
    """Give a meta-device graph storage: its parameters are never written, so they cost no memory; the fp32
    frequencies and tables of positions, where it has them, are. Linear layers become packed ones where the options say
    so."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                dtype = torch.float32 if name in FLOAT32 else options.torch_dtype
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                owner._parameters[name] = nn.Parameter(empty, requires_grad=False)
    for index, (rope, head_dim) in enumerate(config.rotations):
        if (name := frequency_buffer(index)) in module._buffers:
            module._buffers[name] = inverse_frequencies(rope, head_dim).to(device)
    if "rope_cos" in module._buffers:
        tables = rope_tables(config.rope, config.head_dim, options.max_seq_len)
        module.rope_cos, module.rope_sin = (table.to(device) for table in tables)
    if options.packed_dtype is not None:
        pack_linears(module, options.packed_dtype, options.int8_layers)
    return module.eval()


def example_pools(
    config: ModelConfig, options: ResolvedOptions, owners: Sequence[int], device: str = "cpu"
) -> list[tuple[Tensor, ...]]:
    """Return pools of the engine's format for ``owners``, uninitialised."""
    each = (pool_specs(config, options, owner) for owner in owners)
    return [_empty(specs, device) for specs in each]


def example_states(config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> list[tuple[Tensor, ...]]:
    """Return the pools of each layer that keeps a state, uninitialised."""
    layout = options.cache_layout(config)
    return [_empty(torch_specs(layout.linear_state(_STATES, layer)), device) for layer in config.linear_layers]


def rows_example(config: ModelConfig, device: str = "cpu") -> tuple[Any, ...]:
    """Return what ``lower`` takes behind the pools where layers keep a state: no state of a policy, the rows
    that sequences go on from, and those that the states after tokens go to."""
    sizes = (_SEQUENCES, _TOKENS) if config.linear is not None else ()
    return ((), *(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)) if sizes else ()


def _empty(specs: Sequence[tuple[tuple[int, ...], torch.dtype]], device: str) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs)


def pool_specs(config: ModelConfig, options: ResolvedOptions, owner: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape, with example sizes in the first dimension, and dtype of each tensor of an owner's pool."""
    layout, pages = options.cache_layout(config), _EXACT_PAGES if options.policy.sealing else _PAGES
    state = layout.state({"pages": _STATE_PAGES, "sequences": _SLOTS, "cache": _PAGES})
    return torch_specs([*layout.written(pages, owner), *state])


def state_example(options: ResolvedOptions, device: str = "cpu") -> tuple[tuple[Tensor, ...], ...]:
    """Return the last argument of ``lower`` and ``upper`` where the KV policy has inputs, of three sequences; nothing
    elsewhere."""
    inputs = options.policy.keeping.state_inputs
    shapes = [one.shape(_SEQUENCES, _COLUMNS if one.by_pages else _STATE_COLUMNS) for one in inputs]
    return (tuple(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes),) if inputs else ()


def lower_example(config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> tuple[Any, ...]:
    """Return arguments of ``lower`` for a small step of three sequences."""
    tokens = torch.zeros(_TOKENS, dtype=torch.int32, device=device)
    return (
        tokens,
        tokens.clone(),
        tokens.clone(),
        torch.tensor([0, 5, 9, _TOKENS], dtype=torch.int32, device=device),
        torch.tensor([5, 4, 15], dtype=torch.int32, device=device),
        torch.zeros(_SEQUENCES, _COLUMNS, dtype=torch.int32, device=device),
        [*example_pools(config, options, config.written_below, device), *example_states(config, options, device)],
        *state_example(options, device),
        *rows_example(config, device),
    )


def width_of_lower(config: ModelConfig, options: ResolvedOptions) -> int:
    """Return how many numbers of a token ``lower`` gives."""
    return config.width_at_cut + (options.draft_head.width_passed(config) if options.draft_head is not None else 0)


def upper_example(config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> tuple[Any, ...]:
    """Return arguments of ``upper`` for the same step, with five survivors."""
    states = dict(zip(config.linear_layers, example_states(config, options, device), strict=True))
    first = config.linear.first_read if config.linear is not None else 0
    states_above = [states[layer][first:] for layer in config.upper_linear]
    return (
        torch.zeros(_TOKENS, width_of_lower(config, options), dtype=options.torch_dtype, device=device),
        torch.zeros(_SURVIVORS, dtype=torch.int32, device=device),
        torch.tensor([0, 1, 3, _SURVIVORS], dtype=torch.int32, device=device),
        torch.zeros(_TOKENS, dtype=torch.int32, device=device),
        torch.tensor([5, 4, 15], dtype=torch.int32, device=device),
        torch.zeros(_SEQUENCES, _COLUMNS, dtype=torch.int32, device=device),
        [*example_pools(config, options, config.owners_above, device), *states_above],
        *state_example(options, device),
        *past_cut_example(config, device),
    )


def past_cut_example(config: ModelConfig, device: str = "cpu") -> tuple[Any, ...]:
    """Return what ``upper`` takes behind the pools above a blind cut: no state, and the survivors' slots and which of
    them logits are asked for; or the survivors' rows of states, where layers above a cut keep a state."""
    sizes = (_SURVIVORS, _LOGITS) if config.is_blind else (_SURVIVORS,) if config.upper_linear else ()
    return ((), tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)) if sizes else ()


def verify_example(config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> tuple[Tensor, ...]:
    """Return arguments of ``verify``: six drafts of three sequences, with their distributions."""
    rows = _DRAFTS + _SEQUENCES
    return (
        torch.zeros(rows, config.vocab_size, device=device),
        torch.zeros(_DRAFTS, dtype=torch.int32, device=device),
        torch.tensor([0, 2, 2, _DRAFTS], dtype=torch.int32, device=device),
        torch.zeros(_DRAFTS, config.vocab_size, device=device),
        torch.zeros(_SEQUENCES, device=device),
        torch.zeros(rows, 2, device=device),
    )


def make_graph(graph: type[Graph], config: ModelConfig, options: ResolvedOptions) -> Graph:
    """Return ``lower`` or ``upper`` on the meta device, for the cache and the policy of the options."""
    insertion = options.policy.insertion.layer_insertion()
    with torch.device("meta"):
        return graph(config, options.kv_scales, insertion, options.draft_head, options.rotates_keys)


def export_lower(
    config: ModelConfig, options: ResolvedOptions, device: str = "cpu", module_type: type[LowerGraph] = LowerGraph
) -> ExportedGraph:
    """Export ``lower``: T, S, M and the numbers of pages and states are dynamic; with a policy's state also Ms and the
    slots."""
    module = make_graph(module_type, config, options)
    arguments = lower_example(config, options, device)
    auto = Dim.DYNAMIC
    pools = [({0: auto},) * len(pool) for pool in arguments[6]]
    state = [tuple(dict.fromkeys(range(tensor.dim()), auto) for tensor in tensors) for tensors in arguments[7:8]]
    rows = [{0: auto}] * len(arguments[8:])
    dynamic = ({0: auto}, {0: auto}, {0: auto}, {0: auto}, {0: auto}, {0: auto, 1: auto}, pools, *state, *rows)
    module = uninitialised(module, config, options, device)
    program = trace(module, arguments, dynamic)
    operators = () if config.linear is None else config.linear.operators * len(config.linear_layers)
    return ExportedGraph("lower", program, config.written_below, config.written_below, operators)


def export_upper(
    config: ModelConfig, options: ResolvedOptions, device: str = "cpu", module_type: type[UpperGraph] = UpperGraph
) -> ExportedGraph:
    """Export ``upper``: T, R, S, M and numbers of pages are dynamic; with a policy's state also Ms and the slots."""
    module = make_graph(module_type, config, options)
    arguments = upper_example(config, options, device)
    auto = Dim.DYNAMIC
    step = auto if config.has_cut else Dim.AUTO  # without a cut these are not read
    pools = [({0: auto},) * len(pool) for pool in arguments[6]]
    state = [tuple(dict.fromkeys(range(tensor.dim()), step) for tensor in tensors) for tensors in arguments[7:8]]
    slots = [({0: auto},) * len(tensors) for tensors in arguments[8:]]
    dynamic = ({0: auto}, {0: auto}, {0: step}, {0: step}, {0: step}, {0: step, 1: step}, pools, *state, *slots)
    module = uninitialised(module, config, options, device)
    program = trace(module, arguments, dynamic)
    written = config.owners_above if config.is_blind else ()
    operators = () if config.linear is None else config.linear.read_operators * len(config.upper_linear)
    return ExportedGraph("upper", program, config.owners_above, written, operators)


def export_early_exit(config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> ExportedGraph:
    """Export ``early_exit``: T and R are dynamic."""
    with torch.device("meta"):
        module = EarlyExitGraph(config)
    arguments = upper_example(config, options, device)[:2]
    dynamic = tuple({0: Dim.DYNAMIC} for _ in arguments)
    module = uninitialised(module, config, options, device)
    program = trace(module, arguments, dynamic)
    return ExportedGraph("early_exit", program, ())


def export_verify(config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> ExportedGraph:
    """Export ``verify``: the numbers of drafts, of their distributions, of sequences and of rows are dynamic."""
    arguments = verify_example(config, options, device)
    dynamic = tuple({0: Dim.DYNAMIC} for _ in arguments)
    program = trace(VerifyGraph(), arguments, dynamic)
    return ExportedGraph("verify", program, ())


def export_predict(config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> ExportedGraph:
    """Export ``predict``: T, S, M, the number of queries and of pages are dynamic."""
    assert options.prediction is not None
    prediction, auto = options.prediction, Dim.DYNAMIC
    with torch.device("meta"):
        module = PredictGraph(prediction, options.rotates_keys)
    layout = CacheLayout(prediction.auxiliary, options.dtype, options.dtype, options.page_size, Full())
    own = [_empty(torch_specs(layout.written(_PAGES, layer)), device) for layer in range(prediction.num_layers - 1)]
    queries = torch.zeros(_SURVIVORS, dtype=torch.int32, device=device)
    step = lower_example(config, options, device)
    arguments = (*step[:6], queries, step[6], own)
    pools, own_pools = ([({0: auto},) * len(pool) for pool in each] for each in (step[6], own))
    dynamic = (*({0: auto},) * 5, {0: auto, 1: auto}, {0: auto}, pools, own_pools)
    module = uninitialised(module, config, options, device)
    for name, frequencies in frequencies_of(prediction).items():
        parent = module.get_submodule(name.rpartition(".")[0])
        parent._buffers[name.rpartition(".")[2]] = frequencies.to(device)
    program = trace(module, arguments, dynamic)
    return ExportedGraph("predict", program, config.owners)


def export_draft(config: ModelConfig, options: ResolvedOptions, device: str = "cpu") -> ExportedGraph:
    """Export ``draft``: T, R, S, M and the number of pages are dynamic."""
    assert options.draft_head is not None
    head, auto = options.draft_head, Dim.DYNAMIC
    with torch.device("meta"):
        module = HEAD_CODE[head.kind].graph(config, head)
    ids, positions, slots = (torch.zeros(_TOKENS, dtype=torch.int32, device=device) for _ in range(3))
    upper = upper_example(config, options, device)
    hidden = torch.zeros(_TOKENS, head.width, dtype=options.torch_dtype, device=device)
    layout = CacheLayout(head.model, options.dtype, options.dtype, options.page_size, Full())
    pool = _empty(torch_specs(layout.written(_PAGES, 0)), device)
    arguments = (ids, hidden, positions, slots, *upper[1:3], *upper[4:6], pool)
    dynamic = (*({0: auto},) * 7, {0: auto, 1: auto}, ({0: auto},) * len(pool))
    module = with_draft_buffers(uninitialised(module, config, options, device), head, device)
    program = trace(module, arguments, dynamic)
    return ExportedGraph("draft", program, (0,))


def with_draft_buffers(module: nn.Module, head: DraftHead, device: str = "cpu") -> nn.Module:
    """Give the graph ``draft`` its frequencies, and storage for the table of its tokens."""
    part = module.get_submodule("draft")
    for name, buffer in head_buffers(head).items():
        part._buffers[name] = buffer.to(device)
    return module


EXPORTS: dict[str, Callable[..., ExportedGraph]] = {
    "lower": export_lower,
    "upper": export_upper,
    "early_exit": export_early_exit,
    "verify": export_verify,
    "predict": export_predict,
    "draft": export_draft,
}
"""How each graph of an engine is exported: functions of the model, the options and the device."""
