"""Weights in 4 or 8 bits that are rounded by what a calibration text makes of their inputs.

The model's graphs run once, in float32, over all of the text. When the text comes to a linear layer, its inputs say how
its weight is rounded (GPTQ, arXiv 2210.17323), and it goes on through the rounded one. So a layer is rounded by what
the rounded layers before it give, and one weight in float32 is in memory at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import plugins
from kvforge.common.errors import CheckpointError
from kvforge.compiler.convert import EMBEDDING
from kvforge.compiler.cpu_graph import AnyLinear, dtype_of_packed, is_rotated, packed_tensors, stack_packed
from kvforge.compiler.export import example_states, pool_specs
from kvforge.compiler.options import ResolvedOptions
from kvforge.kv_policies import Full
from model_defs import ModelConfig
from model_defs.graphs import EarlyExitGraph, LowerGraph, UpperGraph
from model_defs.layers import ExpertLinear, Linear
from model_defs.rope import frequency_buffer, inverse_frequencies
from plugins.packed_linear import rotated_rows
from plugins.packed_linear.by_inputs import round_by_inputs, round_to_bytes_by_inputs, round_to_codes_by_inputs
from plugins.packed_linear.int4 import Codes
from plugins.packed_linear.int4_steps import SteppedCodes
from plugins.packed_linear.int8 import ByteCodes
from plugins.packed_linear.packing import IN_STEPS, WITH_ZEROS

Read = Callable[[str, bool], Tensor]
"""Returns the engine's tensor of a name as the engine has it; of the embedding, as the head where that is asked for."""
Progress = Callable[[int, int], object]


@torch.inference_mode()
def round_by_text(
    config: ModelConfig,
    options: ResolvedOptions,
    read: Read,
    samples: Sequence[Sequence[int]],
    progress: Progress = lambda done, total: None,
) -> dict[str, dict[str, Tensor]]:
    """Return the packed tensors of every linear layer of an engine with ``options`` by the layer's name.

    ``samples`` are token ids, each a sequence of its own, of which all tokens go past the cut. Experts that no token
    came to are rounded to the nearest. ``progress`` is called with the weights that are rounded and all of
    them. Raises CheckpointError where a layer's inputs are not finite.
    """
    plugins.load_library()
    packed_dtype = options.packed_dtype
    assert packed_dtype is not None
    config = replace(config, kv_scorer=None)  # of another checkpoint, and never rounded
    with torch.device("meta"):
        lower, upper = LowerGraph(config), UpperGraph(config)
        early_exit = EarlyExitGraph(config) if config.early_exit else None
    graphs = [lower, upper, *([early_exit] if early_exit is not None else [])]
    rounding = _Pass(read, packed_dtype, progress)
    for graph in graphs:
        rounding.prepare(graph, config)
    step = _Step.of(config, _exact(options), samples)
    below = [*step.pools[: len(config.written_below)], *step.states]
    hidden = lower(*step.tokens, step.starts, step.lengths, step.table, below, (), *step.rows)
    rows, positions = torch.arange(len(hidden)).int(), step.tokens[1]
    above = [step.pools[config.owners.index(owner)] for owner in config.owners_above]
    slots = step.tokens[2:] if config.is_blind else ()
    upper(hidden, rows, step.starts, positions, step.lengths, step.table, above, (), slots)
    if early_exit is not None:
        early_exit(hidden, rows)
    return rounding.packed


def _exact(options: ResolvedOptions) -> ResolvedOptions:
    """The options of an engine of which nothing is rounded."""
    return replace(options, dtype="float32", kv_dtype="float32", kv_scales=(), quantized_weights=None, policy=Full())


@dataclass(frozen=True)
class _Step:
    """All samples as one step. ``tokens``: ids, positions and slots, each int32 ``[T]``. ``states``: pools of layers
    that keep a state, of which ``rows`` say that none is read or written."""

    tokens: tuple[Tensor, Tensor, Tensor]
    starts: Tensor
    lengths: Tensor
    table: Tensor
    pools: list[tuple[Tensor, ...]]
    states: list[tuple[Tensor, ...]]
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, config: ModelConfig, options: ResolvedOptions, samples: Sequence[Sequence[int]]) -> "_Step":
        lengths = torch.tensor([len(ids) for ids in samples])
        pages = -(-lengths // options.page_size)
        first_pages = pages.cumsum(0) - pages
        positions = torch.cat([torch.arange(len(ids)) for ids in samples])
        slots = positions + (first_pages * options.page_size).repeat_interleave(lengths)
        columns = torch.arange(int(pages.max()))
        table = (first_pages[:, None] + columns).clamp(max=int(pages.sum()) - 1)
        starts = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
        pools = [
            tuple(torch.zeros((int(pages.sum()), *shape[1:]), dtype=dtype) for shape, dtype in specs)
            for specs in (pool_specs(config, options, owner) for owner in config.owners)
        ]
        ids = torch.cat([torch.tensor(one) for one in samples])
        states = example_states(config, options)
        rows = (torch.full_like(lengths, -1).int(), torch.full_like(ids, -1).int()) if states else ()
        tokens = (ids.int(), positions.int(), slots.int())
        return cls(tokens, starts.int(), lengths.int(), table.int(), pools, states, rows)


class _Pass:
    """What is found while the text runs: ``packed``, of each layer that it came to."""

    def __init__(self, read: Read, packed_dtype: torch.dtype, progress: Progress) -> None:
        self._read, self._packed_dtype, self._progress = read, packed_dtype, progress
        self._done = self._total = 0
        self.packed: dict[str, dict[str, Tensor]] = {}

    def prepare(self, graph: nn.Module, config: ModelConfig) -> None:
        """Give ``graph``, without storage, its tensors, and to each layer that is rounded a ``_Rounding`` place."""
        for index, (rope, head_dim) in enumerate(config.rotations):
            if (name := frequency_buffer(index)) in graph._buffers:
                graph._buffers[name] = inverse_frequencies(rope, head_dim)
        for name, layer in list(graph.named_modules()):
            if isinstance(layer, AnyLinear) and not dtype_of_packed(layer, self._packed_dtype).is_floating_point:
                self._total += layer.weight.numel()
                parent, _, own = name.rpartition(".")
                layer.weight = None
                setattr(graph.get_submodule(parent), own, _Rounding(name, layer, self))
        for name, parameter in list(graph.named_parameters()):
            parent, _, own = name.rpartition(".")
            is_head = isinstance(graph, UpperGraph) and name == EMBEDDING
            tensor = self._read(name.replace(f".{_Rounding.INNER}.", "."), is_head)
            graph.get_submodule(parent)._parameters[own] = nn.Parameter(tensor.view(parameter.shape))

    def round(self, name: str, layer: AnyLinear, rows: Tensor | list[Tensor]) -> Tensor:
        """Round the weight of ``layer``, by its inputs ``[T, K]`` or those of each expert; returns what is left."""
        weight = self._read(f"{name}.weight", isinstance(layer, Linear) and layer.is_head)
        if isinstance(rows, Tensor):
            self.packed[name], left = self._round(name, weight, layer, rows)
        else:
            parts = [self._round(name, one, layer, own) for one, own in zip(weight, rows, strict=True)]
            self.packed[name] = stack_packed((packed for packed, _ in parts), len(parts))
            left = torch.stack([one for _, one in parts])
        self._done += weight.numel()
        self._progress(self._done, self._total)
        return left

    def _round(self, name: str, weight: Tensor, layer: AnyLinear, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if not len(rows):
            return packed_tensors(weight, layer, self._packed_dtype), weight
        rotated, dtype = is_rotated(layer, self._packed_dtype), dtype_of_packed(layer, self._packed_dtype)
        moments = rows.T @ rows
        if rotated:  # the rotation is symmetric
            weight, moments = rotated_rows(weight), rotated_rows(rotated_rows(moments).T)
        if not moments.diagonal().isfinite().all():
            raise CheckpointError(
                f"The calibration text makes inputs of {name} that are not finite; correct the checkpoint, or give "
                "--calibration none."
            )
        codes = _rounded(weight, moments, dtype)
        left = codes.dequantize()
        return packed_tensors(codes, layer, self._packed_dtype), rotated_rows(left) if rotated else left


def _rounded(weight: Tensor, moments: Tensor, dtype: torch.dtype) -> ByteCodes | Codes | SteppedCodes:
    if dtype == torch.int8:
        return round_to_bytes_by_inputs(weight, moments)
    if dtype == IN_STEPS:
        return round_by_inputs(weight, moments)
    return round_to_codes_by_inputs(weight, moments, dtype == WITH_ZEROS)


class _Rounding(nn.Module):
    """In the place of a linear layer or of those of experts: rounds it when its inputs come, and is it then."""

    INNER = "layer"

    def __init__(self, name: str, layer: AnyLinear, of: _Pass) -> None:
        super().__init__()
        self.name, self.layer, self._pass, self.gated = name, layer, of, layer.gated

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Arguments and result as the layer's; of a head there is no result, ``[T, 0]``."""
        if isinstance(self.layer, ExpertLinear):
            weight = self._pass.round(self.name, self.layer, _rows_of_experts(x, arguments[0], self.layer))
        else:
            norm = arguments[0] if arguments else options.get("norm")
            weight = self._pass.round(self.name, self.layer, x if norm is None else norm(x))
            if self.layer.is_head:
                return x.new_zeros(len(x), 0)
        self.layer.weight = nn.Parameter(weight, requires_grad=False)
        result: Tensor = self.layer(x, *arguments, **options)
        self.layer.weight = None
        return result


def _rows_of_experts(x: Tensor, expert_ids: Tensor, layer: ExpertLinear) -> list[Tensor]:
    """The inputs of each expert among x ``[T, K]`` or ``[T, k, K]``, whose places ``expert_ids`` ``[T, k]`` says."""
    places = x[:, None].expand(*expert_ids.shape, x.shape[-1]) if x.dim() == 2 else x
    return [places[expert_ids == expert] for expert in range(layer.num_experts)]
