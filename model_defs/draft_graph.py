"""The graph of an EAGLE-3 head, the head's part of the target's graphs, and where its weights come from.

Its weights are named ``draft.…``. Shapes as in ``model_defs.graphs``; H is the head's hidden size.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.draft_head import NUM_STATES, DraftHead
from model_defs.layers import Block, Linear, Pool, RMSNorm, StepInputs
from model_defs.rope import inverse_frequencies, rope_cos_sin
from model_defs.weights import Source, WeightSpec
from plugins.rope_paged_kv_write import rope_paged_kv_write

PREFIX = "draft."
STATES = f"{PREFIX}fc.weight"
"""What turns the target's hidden states into what the head works on."""
TOKEN_OF = f"{PREFIX}token_of"
"""The target's token of each of the head's, int32."""
EMBEDDING = f"{PREFIX}embed.weight"


class HeadTable(nn.Module):
    """A table of embeddings, the head's own or the target's."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))


def unrounded(module: nn.Module) -> nn.Module:
    """Return ``module`` with linear layers that are never packed in fewer bits than activations have."""
    for each in module.modules():
        if isinstance(each, Linear):
            each.quantizes = each.is_head = False
    return module


def head_buffers(head: DraftHead) -> dict[str, Tensor]:
    """Return what a head's graph has besides parameters: RoPE's frequencies, and the target's token of each of the
    head's, int32, not filled."""
    return {
        "inverse_frequencies": inverse_frequencies(*head.model.rotations[0]),
        "token_of": torch.zeros(head.draft_vocab, dtype=torch.int32),
    }


class States(nn.Module):
    """What the target's graphs have of the head: three residual streams to ``[T, H]``."""

    def __init__(self, config: ModelConfig, head: DraftHead) -> None:
        super().__init__()
        self.layers = head.layers
        self.fc = unrounded(Linear(NUM_STATES * config.hidden_size, head.width, False))

    def forward(self, streams: Mapping[int, Tensor]) -> Tensor:
        """Return ``[T, H]`` of the streams by layer, each ``[T, hidden_size]``."""
        return self.fc(torch.cat([streams[layer] for layer in self.layers], dim=-1))


class HeadLayer(Block):
    """The head's layer: q, k and v are made of a token's embedding and a hidden state, side by side."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head.model, 0)
        self.hidden_norm = RMSNorm(head.width, head.model.rms_norm_eps)

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes q, and k and v."""
        self.q = Linear(2 * config.hidden_size, config.q_dim_of(layer), False)
        self.kv = Linear(2 * config.hidden_size, 2 * config.kv_dim_of(layer), False)


class Head(nn.Module):
    """All of the head but ``States``."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.embed = HeadTable(head.model.vocab_size, head.width) if head.own_embedding else None
        self.layer = HeadLayer(head)
        self.norm = RMSNorm(head.width, head.model.rms_norm_eps)
        self.lm_head = Linear(head.width, head.draft_vocab, False, float32_out=True)
        for name, buffer in head_buffers(head).items():
            self.register_buffer(name, buffer)


class DraftGraph(nn.Module):
    """One pass of the head: the K and V of T tokens, and of R of them the next token and hidden state."""

    def __init__(self, config: ModelConfig, head: DraftHead) -> None:
        super().__init__()
        self.head = head
        self.embed = None if head.own_embedding else HeadTable(config.vocab_size, config.hidden_size)
        self.draft = unrounded(Head(head))

    def forward(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        survivor_index: Tensor,
        survivor_start: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        pool: Pool,
    ) -> tuple[Tensor, Tensor]:
        """Return the most probable tokens int32 ``[R]`` and the hidden states ``[R, H]`` that the next pass takes; the
        pool then has the K and V of all T.

        Row i has the hidden state of a token, its position, and the id of the token behind it. ``survivor_index``
        int32 ``[R]`` are the last rows of each sequence that are wanted.
        """
        part, eps = self.draft, self.head.model
        layer = part.layer
        table = (self.embed or part.embed).weight
        normed = layer.hidden_norm(hidden)
        x = torch.cat((layer.input_norm(F.embedding(input_ids, table)), normed), dim=-1)
        cos, sin = rope_cos_sin(positions, part.inverse_frequencies)
        k, v = (each.unflatten(-1, (eps.num_kv_heads, eps.head_dim)) for each in layer.kv(x).chunk(2, dim=-1))
        pool = rope_paged_kv_write(k, v, cos, sin, slot_mapping, *pool)
        x, stream, cos, sin = (
            each.index_select(0, survivor_index)
            for each in (x, normed if self.head.norm_before_residual else hidden, cos, sin)
        )
        q = layer.q(x).unflatten(-1, (eps.num_heads, eps.head_dim))
        step = StepInputs(survivor_start, kv_length, page_table, cos, sin)
        stream, _ = layer.finish(stream, q, pool, step, (1.0, 1.0))
        best = part.lm_head(stream, part.norm).argmax(-1)
        return part.token_of.index_select(0, best), stream


def draft_weight_specs(config: ModelConfig, head: DraftHead) -> list[WeightSpec]:
    """Return every tensor of the head, with its sources in the head's checkpoint, but for ``token_of``; the embedding
    may be the target's."""
    model, width, layer = head.model, head.width, "layers.0"
    of_attention, of_mlp = f"{layer}.self_attn", f"{layer}.mlp"
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        STATES: {"fc": (width, NUM_STATES * config.hidden_size)},
        **({EMBEDDING: {"embed_tokens": (model.vocab_size, width)}} if head.own_embedding else {}),
        "draft.layer.q.weight": {f"{of_attention}.q_proj": (model.q_dim, 2 * width)},
        "draft.layer.kv.weight": {f"{of_attention}.{one}_proj": (model.kv_dim, 2 * width) for one in "kv"},
        "draft.layer.o.weight": {f"{of_attention}.o_proj": (width, model.q_dim)},
        "draft.layer.gate_up.weight": {f"{of_mlp}.{one}_proj": (model.intermediate_size, width) for one in _GATED},
        "draft.layer.down.weight": {f"{of_mlp}.down_proj": (width, model.intermediate_size)},
        "draft.layer.input_norm.weight": {f"{layer}.input_layernorm": (width,)},
        "draft.layer.hidden_norm.weight": {f"{layer}.hidden_norm": (width,)},
        "draft.layer.post_norm.weight": {f"{layer}.post_attention_layernorm": (width,)},
        "draft.norm.weight": {"norm": (width,)},
        "draft.lm_head.weight": {"lm_head": (head.draft_vocab, width)},
    }
    return [
        WeightSpec(name, tuple(Source(f"{source}.weight", shape) for source, shape in sources.items()))
        for name, sources in shapes.items()
    ]


_GATED = ("gate", "up")
