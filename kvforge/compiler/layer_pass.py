"""A run of a model's graphs over a text, in float32, in which a linear layer is given its weight when its inputs come.

So one such weight is in memory at a time, and what a layer is given may depend on its inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import plugins
from kvforge.compiler.convert import EMBEDDING
from kvforge.compiler.cpu_graph import AnyLinear, dtype_of_packed
from kvforge.compiler.export import example_states, pool_specs
from kvforge.compiler.options import ResolvedOptions
from kvforge.kv_policies import Full
from model_defs import ModelConfig
from model_defs.graphs import EarlyExitGraph, LowerGraph, UpperGraph
from model_defs.layers import ExpertLinear, Linear
from model_defs.rope import frequency_buffer, inverse_frequencies

Read = Callable[[str, bool], Tensor]
"""Returns the engine's tensor of a name as the engine has it; of the embedding, as the head where that is asked for."""
Progress = Callable[[int, int], object]


class LayerPass(ABC):
    """What becomes of each layer whose weights are quantized: ``visit`` is called with its weight and inputs. Without
    ``gives_logits`` the head's weight is visited, and not multiplied."""

    gives_logits = False

    def __init__(
        self,
        config: ModelConfig,
        options: ResolvedOptions,
        read: Read,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.config = replace(config, kv_scorer=None)  # of another checkpoint, and never rounded
        self.options, self._read, self._progress = options, read, progress
        self._done = self._total = 0

    @abstractmethod
    def visit(self, name: str, weight: Tensor, layer: AnyLinear, rows: Tensor) -> Tensor:
        """Return the weight ``[N, K]`` that a layer, or one of its experts, goes on with, given its own and its inputs
        ``[T, K]``."""

    def finish(self, name: str) -> None:  # noqa: B027 (most have nothing to do)
        """Told that all matrices of a layer have been visited."""

    @torch.inference_mode()
    def run(self, samples: Sequence[Sequence[int]]) -> Tensor:
        """Run all graphs over ``samples``, token ids, each a sequence of its own, of which all tokens go past the cut;
        returns the logits of all tokens, or ``[T, 0]``."""
        plugins.load_library()
        config = self.config
        with torch.device("meta"):
            lower, upper = LowerGraph(config), UpperGraph(config)
            early_exit = EarlyExitGraph(config) if config.early_exit else None
        for graph in (lower, upper, *([early_exit] if early_exit is not None else [])):
            self._prepare(graph)
        step = _Step.of(config, _exact(self.options), samples)
        below = [*step.pools[: len(config.written_below)], *step.states]
        hidden = lower(*step.tokens, step.starts, step.lengths, step.table, below, (), *step.rows)
        rows, positions = torch.arange(len(hidden)).int(), step.tokens[1]
        above = [step.pools[config.owners.index(owner)] for owner in config.owners_above]
        slots = step.tokens[2:] if config.is_blind else ()
        logits: Tensor = upper(hidden, rows, step.starts, positions, step.lengths, step.table, above, (), slots)
        if early_exit is not None:
            early_exit(hidden, rows)
        return logits

    def _prepare(self, graph: nn.Module) -> None:
        """Give ``graph``, without storage, its tensors, and to each layer that is quantized a ``_Visited`` place."""
        for index, (rope, head_dim) in enumerate(self.config.rotations):
            if (name := frequency_buffer(index)) in graph._buffers:
                graph._buffers[name] = inverse_frequencies(rope, head_dim)
        packed_dtype = self.options.packed_dtype
        assert packed_dtype is not None
        for name, layer in list(graph.named_modules()):
            if isinstance(layer, AnyLinear) and not dtype_of_packed(layer, packed_dtype).is_floating_point:
                self._total += layer.weight.numel()
                parent, _, own = name.rpartition(".")
                layer.weight = None
                setattr(graph.get_submodule(parent), own, _Visited(name, layer, self))
        for name, parameter in list(graph.named_parameters()):
            parent, _, own = name.rpartition(".")
            is_head = isinstance(graph, UpperGraph) and name == EMBEDDING
            tensor = self._read(name.replace(f".{_Visited.INNER}.", "."), is_head)
            graph.get_submodule(parent)._parameters[own] = nn.Parameter(tensor.view(parameter.shape))

    def weight_of(self, name: str, layer: AnyLinear, rows: Tensor | list[Tensor]) -> Tensor:
        """Return what ``layer`` goes on with, given its inputs ``[T, K]`` or those of each expert."""
        weight = self._read(f"{name}.weight", isinstance(layer, Linear) and layer.is_head)
        if isinstance(rows, Tensor):
            left = self.visit(name, weight, layer, rows)
        else:
            left = torch.stack([self.visit(name, one, layer, own) for one, own in zip(weight, rows, strict=True)])
        self.finish(name)
        self._done += weight.numel()
        self._progress(self._done, self._total)
        return left


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


class _Visited(nn.Module):
    """In the place of a linear layer or of those of experts: is it, with the weight that the pass gives."""

    INNER = "layer"

    def __init__(self, name: str, layer: AnyLinear, of: LayerPass) -> None:
        super().__init__()
        self.name, self.layer, self._pass, self.gated = name, layer, of, layer.gated

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Arguments and result as the layer's; of a head that gives no logits, ``[T, 0]``."""
        if isinstance(self.layer, ExpertLinear):
            weight = self._pass.weight_of(self.name, self.layer, _rows_of_experts(x, arguments[0], self.layer))
        else:
            norm = arguments[0] if arguments else options.get("norm")
            weight = self._pass.weight_of(self.name, self.layer, x if norm is None else norm(x))
            if self.layer.is_head and not self._pass.gives_logits:
                return x.new_zeros(len(x), 0)
        self.layer.weight = nn.Parameter(weight, requires_grad=False)
        result: Tensor = self.layer(x, *arguments, **options)
        self.layer.weight = None
        return result


def _rows_of_experts(x: Tensor, expert_ids: Tensor, layer: ExpertLinear) -> list[Tensor]:
    """The inputs of each expert among x ``[T, K]`` or ``[T, k, K]``, whose places ``expert_ids`` ``[T, k]`` says."""
    places = x[:, None].expand(*expert_ids.shape, x.shape[-1]) if x.dim() == 2 else x
    return [places[expert_ids == expert] for expert in range(layer.num_experts)]
