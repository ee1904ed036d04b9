"""The graph that predicts a base model's cache (arXiv 2410.08391), and where its weights come from.

Its own weights are named ``auxiliary.…``; a base's norm of K and RoPE frequencies are those of its other graphs. Shapes
as in ``model_defs.graphs``.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.graphs import Embedding
from model_defs.layers import Block, Linear, Pool, RMSNorm, StepInputs, norm_of_heads, to_stream
from model_defs.prediction import MAPS, Prediction
from model_defs.rope import apply_rope, frequency_buffer, inverse_frequencies, rope_cos_sin
from model_defs.rope_config import RotaryRows
from model_defs.weights import Source, WeightSpec, weight_specs
from plugins.rope_paged_kv_write import rope_paged_kv_write

PREFIX = "auxiliary."


class Auxiliary(nn.Module):
    """What the graph has of the auxiliary model: its embedding, the layers that are run, the norms of those whose input
    is read, and for each of these one GEMM to K and V of all owners that read it."""

    def __init__(self, prediction: Prediction) -> None:
        super().__init__()
        config, last = prediction.auxiliary, prediction.num_layers - 1
        self.embed = Embedding(config)
        layers: dict[str, nn.Module] = {str(layer): Block(config, layer) for layer in range(last)}
        norms = {"input_norm": RMSNorm(config.hidden_size, config.stream_eps)} if config.pre_norms else {}
        layers[str(last)] = nn.ModuleDict(norms)
        self.layers = nn.ModuleDict(layers)
        maps = {}
        for layer in sorted(set(prediction.layers)):
            rows = 2 * prediction.base.kv_dim * len(readers(prediction, layer))
            maps[str(layer)] = Linear(config.hidden_size, rows, True)
        self.maps = nn.ModuleDict(maps)


def readers(prediction: Prediction, layer: int) -> list[int]:
    """Return the base's owners whose K and V come from the input of an auxiliary layer."""
    return [owner for owner, read in zip(prediction.base.owners, prediction.layers, strict=True) if read == layer]


class PredictGraph(nn.Module):
    """The auxiliary model over a step's tokens, with a cache of its own in the sequences' pages, and the base's cache
    from the inputs of its layers."""

    def __init__(self, prediction: Prediction, rotates_keys: bool = False) -> None:
        super().__init__()
        self.prediction = prediction
        self.rotates_keys = rotates_keys
        self.auxiliary = Auxiliary(prediction)
        base = prediction.base
        if base.qk_norm:
            norms = {
                str(owner): nn.ModuleDict({"k_norm": norm_of_heads(base, base.num_kv_heads, base.head_dim)})
                for owner in base.owners
            }
            self.layers = nn.ModuleDict(norms)
        for name, frequencies in frequencies_of(prediction).items():
            owner = self.auxiliary if name.startswith(PREFIX) else self
            owner.register_buffer(name.removeprefix(PREFIX), frequencies)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        query_start: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        query_index: Tensor,
        pools: list[Pool],
        auxiliary_pools: list[Pool],
    ) -> Tensor:
        """Return rotated queries ``[Q, layers run, heads, head_dim]`` of the auxiliary model, of packed tokens
        ``query_index`` int32 ``[Q]``; the pools are written in place.

        ``pools`` are those of ``base.owners``, each written once; ``auxiliary_pools`` K and V of each layer run.
        """
        prediction, part = self.prediction, self.auxiliary
        config, base = prediction.auxiliary, prediction.base
        rotations = {
            rotation: rope_cos_sin(positions, part.get_buffer(frequency_buffer(index)))
            for index, rotation in enumerate(config.rotations)
        }
        base_rotations = {
            rotation: rope_cos_sin(positions, self.get_buffer(frequency_buffer(index)))
            for index, rotation in enumerate(base.rotations)
        }
        hidden = to_stream(config, F.embedding(input_ids, part.embed.weight))
        queries = []
        for layer in range(prediction.num_layers):
            block = part.layers[str(layer)]
            norm = block.input_norm if config.pre_norms else None
            owners = readers(prediction, layer)
            if owners:
                chunks = part.maps[str(layer)](hidden, norm).chunk(2 * len(owners), dim=-1)
                heads = [chunk.unflatten(-1, (base.num_kv_heads, base.head_dim)) for chunk in chunks]
                for place, owner in enumerate(owners):
                    k, v = heads[2 * place : 2 * place + 2]
                    if base.qk_norm:
                        k = self.layers[str(owner)]["k_norm"](k)
                    pool, (cos, sin) = pools[base.owners.index(owner)], base_rotations[base.rotation_of(owner)]
                    rope_paged_kv_write(k, v, cos, sin, slot_mapping, *pool, rotates_keys=self.rotates_keys)
            if layer == prediction.num_layers - 1:
                break
            q, k, v = block.project_qkv(hidden)
            cos, sin = rotations[config.rotation_of(layer)]
            written = rope_paged_kv_write(k, v, cos, sin, slot_mapping, *auxiliary_pools[layer])
            chosen = (each.index_select(0, query_index) for each in (q, cos, sin))
            queries.append(apply_rope(*chosen))
            step = StepInputs(query_start, kv_length, page_table, cos, sin)
            hidden, _ = block.finish(hidden, q, written, step, (1.0, 1.0))
        return torch.stack(queries, dim=1)


def frequencies_of(prediction: Prediction) -> dict[str, Tensor]:
    """Return the graph's RoPE frequencies by name."""
    return {
        f"{prefix}{frequency_buffer(index)}": inverse_frequencies(rope, head_dim)
        for prefix, config in (("", prediction.base), (PREFIX, prediction.auxiliary))
        for index, (rope, head_dim) in enumerate(config.rotations)
    }


def predict_weight_specs(prediction: Prediction) -> list[WeightSpec]:
    """Return every tensor of the graph that the base's other graphs have not, with its sources in the predictor's
    checkpoint."""
    last = prediction.num_layers - 1
    whole = tuple(f"layers.{layer}." for layer in range(last))
    specs = [
        replace(spec, name=f"{PREFIX}{spec.name}")
        for spec in weight_specs(prediction.auxiliary)
        if spec.name in ("embed.weight", f"layers.{last}.input_norm.weight") or spec.name.startswith(whole)
    ]
    return [*specs, *(_map(prediction, layer, kind) for layer in sorted(set(prediction.layers)) for kind in _KINDS)]


_KINDS = ("weight", "bias")


def _map(prediction: Prediction, layer: int, kind: str) -> WeightSpec:
    base, sources = prediction.base, []
    columns = (prediction.auxiliary.hidden_size,) if kind == "weight" else ()
    for owner in readers(prediction, layer):
        shape = (base.kv_dim_of(owner), *columns)
        rotary = RotaryRows(*base.rotation_of(owner), not base.qk_norm)
        k = Source(f"{MAPS}.{owner}.k_proj.{kind}", shape, None if rotary.is_nothing else rotary)
        sources += [k, Source(f"{MAPS}.{owner}.v_proj.{kind}", shape)]
    return WeightSpec(f"{PREFIX}maps.{layer}.{kind}", tuple(sources))
