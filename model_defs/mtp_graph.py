"""The graph of a module for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), its part of the
target's graphs, and where its weights come from.

The hidden state that the module reads is the one behind the target's last norm; a draft's is the one behind the
module's own norm, with which the module drafts on.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.blocks import make_blocks
from model_defs.config import ModelConfig
from model_defs.draft_graph import PREFIX, HeadTable, head_buffers, unrounded
from model_defs.draft_head import DraftHead
from model_defs.families import families
from model_defs.layers import Linear, Pool, RMSNorm, StepInputs
from model_defs.rope import rope_cos_sin
from model_defs.weights import Source, WeightSpec, weight_specs
from plugins.latent_kv_write import latent_kv_write
from plugins.rope_paged_kv_write import rope_paged_kv_write

TURN = f"{PREFIX}turn"
"""What turns the target's stream back: the matrix Q of the basis that an engine has it in."""


class NormedState(nn.Module):
    """What the target's graphs have of the module: the stream that leaves the last layer, turned back where the engine
    has it in another basis, and normed."""

    def __init__(self, config: ModelConfig, head: DraftHead) -> None:
        super().__init__()
        self.layers = head.layers
        self.turn = unrounded(Linear(config.hidden_size, config.hidden_size, False)) if head.is_turned else None
        self.final_norm = RMSNorm(config.hidden_size, config.stream_eps)

    def forward(self, streams: Mapping[int, Tensor]) -> Tensor:
        """Return ``[T, hidden_size]`` of the streams by layer, each ``[T, hidden_size]``."""
        (layer,) = self.layers
        stream = streams[layer] if self.turn is None else self.turn(streams[layer])
        return self.final_norm(stream)


class MtpModule(nn.Module):
    """What a module has of its own."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        model, width = head.model, head.width
        self.embed = HeadTable(model.vocab_size, width) if head.own_embedding else None
        self.embedding_norm = RMSNorm(width, model.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, model.rms_norm_eps)
        self.projection = Linear(2 * width, width, False)
        self.layers = make_blocks(model, range(1))
        self.norm = RMSNorm(width, model.stream_eps)
        self.lm_head = Linear(width, model.vocab_size, False, float32_out=True) if head.own_lm_head else None
        for name, buffer in head_buffers(head).items():
            self.register_buffer(name, buffer)


class MtpGraph(nn.Module):
    """One pass of the module: see ``draft_graph.DraftGraph``, whose arguments and results it has."""

    def __init__(self, config: ModelConfig, head: DraftHead) -> None:
        super().__init__()
        self.model = head.model
        self.embed = None if head.own_embedding else HeadTable(config.vocab_size, config.hidden_size)
        self.lm_head = None
        if not head.own_lm_head:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, False, float32_out=True, is_head=True)
        self.draft = unrounded(MtpModule(head))

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
        """Return the most probable tokens int32 ``[R]`` and the normed hidden states ``[R, H]`` that the next pass
        takes; the pool then has the K and V, or the rows, of all T."""
        part = self.draft
        block = part.layers["0"]
        embedded = F.embedding(input_ids, (self.embed or part.embed).weight)
        x = part.projection(torch.cat((part.embedding_norm(embedded), part.hidden_norm(hidden)), dim=-1))
        cos, sin = rope_cos_sin(positions, part.inverse_frequencies)
        q, *kv = block.project_qkv(x)
        if self.model.latent is None:
            pool = rope_paged_kv_write(kv[0], kv[1], cos, sin, slot_mapping, *pool)
        else:
            pool = latent_kv_write(kv[0], cos, sin, slot_mapping, *pool)
        x, q, cos, sin = (each.index_select(0, survivor_index) for each in (x, q, cos, sin))
        step = StepInputs(survivor_start, kv_length, page_table, cos, sin)
        x = part.norm(block.finish(x, q, pool, step, (1.0, 1.0))[0])
        best = (part.lm_head if self.lm_head is None else self.lm_head)(x).argmax(-1)
        return part.token_of.index_select(0, best), x


def mtp_weight_specs(config: ModelConfig, head: DraftHead) -> list[WeightSpec]:
    """Return every tensor of the module with its sources in the target's checkpoint, but for ``token_of``."""
    layout, width, offset = families()[config.model_type].mtp, head.width, config.norm_offset
    assert layout is not None
    prefix = layout.prefix_of(config)
    skipped = {name for name, is_own in (("embed", head.own_embedding), ("lm_head", head.own_lm_head)) if not is_own}
    sources = {
        "final_norm": Source("model.norm.weight", (width,), offset=offset),
        "embedding_norm": Source(f"{prefix}{layout.embedding_norm}.weight", (width,), offset=offset),
        "hidden_norm": Source(f"{prefix}{layout.hidden_norm}.weight", (width,), offset=offset),
        "projection": Source(f"{prefix}{layout.projection}.weight", (width, 2 * width)),
    }
    found = [WeightSpec(f"{PREFIX}{name}.weight", (source,)) for name, source in sources.items()]
    for spec in weight_specs(head.model):
        if spec.name.removesuffix(".weight") not in skipped:
            stored = tuple(replace(one, name=layout.stored_name(config, one.name)) for one in spec.sources)
            found.append(replace(spec, name=f"{PREFIX}{spec.name}", sources=stored))
    return found
