"""The two functions a model is compiled into, cut where SwiftKV cuts (arXiv 2410.03960, section 3), and two optional
ones: the head of an early exit at the cut, and the verification of drafts.

Shapes: T packed tokens, S sequences, R survivors, M page-table columns; all dynamic. Parameter names are those
of ``model_defs.weights``; a tied LM head is the embedding, under one name in both graphs. ``kv_scales`` are the static
scales of each of ``config.owners``, or ``()`` where the cache has none or keeps its own. ``insertion`` is the KV
policy's part, whose inputs the graphs take as ``state``; without one these are ``()``. ``rotates_keys`` is what the
operators take, for a cache of int8 that attention alone reads.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.blocks import make_blocks, make_updates
from model_defs.cache_insertion import CacheInsertion
from model_defs.config import ModelConfig
from model_defs.draft_head import DraftHead
from model_defs.head_kinds import HEAD_CODE
from model_defs.kv_layout import first_page
from model_defs.latent_layers import LatentInput, LatentRows
from model_defs.layers import (
    KVScales,
    Linear,
    PolicyPart,
    Pool,
    RMSNorm,
    StepInputs,
    capped,
    divided,
    norm_of_heads,
    to_stream,
)
from model_defs.per_layer import PerLayerInput
from model_defs.rope import frequency_buffer, inverse_frequencies, query_growth, rope_cos_sin, rope_tables
from model_defs.state_steps import SingleInputStates, StateInputs, StateReads
from model_defs.token_scores import TokenScorer, write_scores
from plugins.latent_kv_write import latent_kv_write
from plugins.rope_paged_kv_write import rope_paged_kv_write
from plugins.speculative_verify import speculative_verify


def scales_by_owner(config: ModelConfig, kv_scales: Sequence[KVScales]) -> dict[int, KVScales]:
    """Return the scales of each owner layer, 1 where none are given; raises ValueError unless there is one each."""
    return dict(zip(config.owners, kv_scales or [(1.0, 1.0)] * len(config.owners), strict=True))


class PositionedGraph(nn.Module):
    """A graph of layers: it knows RoPE's frequencies, and cos and sin of every position for an ``insertion`` that needs
    them. Pools are written in place; where it ``returns_pools``, the graph has no effects and new pools are results."""

    returns_pools = False

    def __init__(
        self,
        config: ModelConfig,
        kv_scales: Sequence[KVScales],
        insertion: CacheInsertion | None,
        rotates_keys: bool,
    ) -> None:
        super().__init__()
        self.config = config
        self.kv_scales = scales_by_owner(config, kv_scales)
        self.insertion = insertion
        self.rotates_keys = rotates_keys

    def register_positions(self) -> None:
        """Register the buffers; after the parameters, so that graphs list these first."""
        config = self.config
        for index, (rope, head_dim) in enumerate(config.rotations):
            self.register_buffer(frequency_buffer(index), inverse_frequencies(rope, head_dim))
        if self.insertion is not None and self.insertion.needs_positions:
            cos, sin = rope_tables(config.rope, config.head_dim, config.max_position)
            self.register_buffer("rope_cos", cos)
            self.register_buffer("rope_sin", sin)

    def steps(
        self,
        positions: Tensor,
        query_start: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        state: tuple[Tensor, ...],
    ) -> tuple[StepInputs, ...]:
        """Return the step as each layer sees it, whose heads have rotations of their own: at ``positions`` ``[T]``."""
        rotations, policy = self.config.rotations, self.policy_part(state)
        growth = query_growth(self.config.query_growth, positions)
        each = [
            StepInputs(
                query_start,
                kv_length,
                page_table,
                *rope_cos_sin(positions, self.get_buffer(name)),
                policy,
                growth,
                self.rotates_keys,
            )
            for name in map(frequency_buffer, range(len(rotations)))
        ]
        return tuple(each[rotations.index(self.config.rotation_of(layer))] for layer in range(self.config.num_layers))

    def policy_part(self, state: tuple[Tensor, ...]) -> PolicyPart:
        """Return what an insertion puts into the layers of a step."""
        insertion = self.insertion
        if insertion is None:
            return PolicyPart()
        tables = (self.get_buffer("rope_cos"), self.get_buffer("rope_sin")) if insertion.needs_positions else ()
        return PolicyPart(
            insertion.num_pools,
            insertion.after_write(state),
            insertion.begin(state, tables),
            insertion.attention(state),
            insertion.after_attention(state),
        )

    def results(self, first: Tensor, pools: Sequence[Pool]) -> Any:
        """Return what the graph does: ``first``, or that and the tensors of ``pools``, flat."""
        return (first, *(tensor for pool in pools for tensor in pool)) if self.returns_pools else first

    @property
    def owners_share(self) -> bool:
        """See ``CacheInsertion``."""
        return self.insertion is not None and self.insertion.owners_share

    def first_page(self, owner: int, pool: Pool) -> int:
        """Return where an owner's pages begin in the pool of all."""
        return first_page(self.config.owners.index(owner), pool[0].shape[0], len(self.config.owners))

    def own_pages(self, step: StepInputs, owner: int, pool: Pool) -> StepInputs:
        """Return the step with an owner's pages as they are numbered in its pool."""
        return replace(step, page_table=step.page_table + self.first_page(owner, pool)) if self.owners_share else step

    def write(self, owner: int, kv: Sequence[Tensor], pool: Pool, slot_mapping: Tensor, step: StepInputs) -> Pool:
        """Write K and V, or rows, none rotated, of T tokens to their slots ``[T]`` in an owner's pool; returns it."""
        if self.config.latent is not None:
            return latent_kv_write(kv[0], step.cos, step.sin, slot_mapping, *pool)
        k_scale, v_scale = self.kv_scales[owner]
        cache = pool[: len(pool) - step.policy.num_pools]
        if self.owners_share:
            first_slot = self.first_page(owner, pool) * pool[0].shape[1]
            slot_mapping = torch.where(slot_mapping < 0, slot_mapping, slot_mapping + first_slot)
        written = rope_paged_kv_write(
            kv[0],
            kv[1],
            step.cos,
            step.sin,
            slot_mapping,
            *cache,
            k_scale=k_scale,
            v_scale=v_scale,
            rotates_keys=step.rotates_keys,
        )
        pool = (*written, *pool[len(cache) :])
        if step.policy.after_write is not None:
            step.policy.after_write(pool, step.pages)
        return pool


class Embedding(nn.Module):
    """Holds the token embedding, whose name is ``embed.weight`` in both graphs."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(config.hidden_size, config.vocab_size, False).weight)


class SingleInputKV(nn.Module):
    """SwiftKV's K and V of every owner above the cut, from the one hidden state entering the cut layer.

    One shared norm, one GEMM ``[sum over owners of 2 * kv_dim, hidden]`` (sections 3.2 and 3.5).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_shape = (config.num_kv_heads, config.head_dim)
        self.num_owners = len(config.upper_owners)
        self.norm = RMSNorm(config.hidden_size, config.stream_eps) if config.pre_norms else None
        if self.num_owners:
            self.kv = Linear(config.hidden_size, 2 * self.num_owners * config.kv_dim, config.qkv_bias)

    def forward(self, hidden: Tensor) -> list[tuple[Tensor, ...]]:
        """Return (k, v), each ``[T, kv_heads, head_dim]`` and not rotated, per owner."""
        if not self.num_owners:
            return []
        parts = [
            part.unflatten(-1, self.head_shape)
            for part in self.kv(hidden, self.norm).chunk(2 * self.num_owners, dim=-1)
        ]
        return list(zip(parts[0::2], parts[1::2], strict=True))


class LowerGraph(PositionedGraph):
    """Embedding, layers below the cut, and all K,V above it, for every token of the step."""

    def __init__(
        self,
        config: ModelConfig,
        kv_scales: Sequence[KVScales] = (),
        insertion: CacheInsertion | None = None,
        head: DraftHead | None = None,
        rotates_keys: bool = False,
    ) -> None:
        super().__init__(config, kv_scales, insertion, rotates_keys)
        self.head, self.draft = head, None
        self.embed = Embedding(config)
        self.per_layer = PerLayerInput(config) if config.per_layer_input else None
        self.layers = make_blocks(config, range(config.cut))
        if config.is_swiftkv:
            self.single_input = SingleInputKV(config) if config.latent is None else LatentInput(config)
            if config.latent is not None:
                for owner in config.upper_owners:
                    self.layers[str(owner)] = nn.ModuleDict({"rows": LatentRows(config.latent)})
            if config.qk_norm:
                for owner in config.upper_owners:
                    k_norm = norm_of_heads(config, config.num_kv_heads, config.head_dim)
                    self.layers[str(owner)] = nn.ModuleDict({"k_norm": k_norm})
        if config.linear is not None and config.upper_linear:
            self.layers.update(make_updates(config))
            self.state_input = SingleInputStates(config, config.linear)
        if head is not None and head.reads_below(config):
            self.draft = HEAD_CODE[head.kind].states(config, head)
        if config.kv_scorer is not None:
            self.scorers = nn.ModuleDict({str(owner): TokenScorer(config) for owner in config.owners})
        self.register_positions()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        query_start: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        pools: list[Pool],
        state: tuple[Tensor, ...] = (),
        state_read: Tensor | None = None,
        state_write: Tensor | None = None,
    ) -> Any:
        """Return the hidden state ``[T, width_at_cut]`` entering the cut layer, with what the layers above it have of
        their own at its end, then what a draft head reads (``DraftHead.width_passed``); the pools then have this step's
        K and V.

        ``input_ids``, ``positions`` and ``slot_mapping`` are int32 ``[T]``; ``pools`` are those of
        ``config.written_below``, in order, as are the new ones. Each of these is written once, and with an
        insertion again before a layer reads it. Where layers keep a state, the pools of each follow in
        ``pools``, and ``state_read`` and ``state_write`` say which rows of them the step reads and writes
        (``model_defs.state_layers``).
        """
        config = self.config
        steps = self.steps(positions, query_start, kv_length, page_table, state)
        hidden = to_stream(config, F.embedding(input_ids, self.embed.weight))
        own_inputs = None if self.per_layer is None else self.per_layer(input_ids, hidden)
        new_pools: list[Pool] = []
        streams = dict[int, Tensor]()
        states = None
        if state_read is not None and state_write is not None:
            states = StateInputs(query_start, state_read, state_write)
        for layer in range(config.cut):
            if self.head is not None and layer in self.head.layers:
                streams[layer] = hidden
            block, step, owner = self.layers[str(layer)], steps[layer], config.owner_of_layer[layer]
            if not config.has_mixer(layer):
                hidden = block.mlp(hidden)
                continue
            if config.is_linear(layer):
                hidden = block.mix(hidden, pools[config.state_pool_of(layer)], states)
                continue
            if owner == layer:
                q, *kv = block.project_qkv(hidden)
                index = len(new_pools)
                new_pools.append(self.write(layer, kv, pools[index], slot_mapping, step))
                self._write_scores(layer, new_pools[index], hidden, block.input_norm, slot_mapping)
            else:
                q, index = block.project_q(hidden), config.owners.index(owner)
            written, own_input = new_pools[index], None if own_inputs is None else own_inputs[:, layer]
            own = self.own_pages(step, owner, written)
            hidden, new_pools[index] = block.finish(hidden, q, written, own, self.kv_scales[owner], own_input)
        streams[config.cut] = hidden
        if config.is_swiftkv:
            owned = self.single_input(hidden)
            first = len(config.written_below) - len(config.upper_owners)
            of_owners = pools[first : len(config.written_below)]
            for owner, kv, pool in zip(config.upper_owners, owned, of_owners, strict=True):
                if config.qk_norm or config.latent is not None:
                    make_key = self.layers[str(owner)]["k_norm" if config.qk_norm else "rows"]
                    kv = (make_key(kv[0]), *kv[1:])
                new_pools.append(self.write(owner, kv, pool, slot_mapping, steps[owner]))
                self._write_scores(owner, new_pools[-1], hidden, self.single_input.norm, slot_mapping)
            if config.upper_linear:
                above = pools[config.state_pool_of(config.upper_linear[0]) :]
                made = self.state_input(hidden, self.single_input.norm)
                for layer, parts, pool in zip(config.upper_linear, made, above, strict=True):
                    self.layers[str(layer)]["state"](*parts, pool, states)
        if own_inputs is not None and config.has_cut:
            hidden = torch.cat((hidden, own_inputs[:, config.cut :].flatten(1)), dim=-1)
        if self.head is not None:
            passed = [streams[layer] for layer in self.head.passed(config)]
            passed = passed if self.draft is None else [self.draft(streams)]
            hidden = torch.cat((hidden, *passed), dim=-1)
        return self.results(hidden, new_pools)

    def _write_scores(self, owner: int, pool: Pool, hidden: Tensor, norm: RMSNorm | None, slot_mapping: Tensor) -> None:
        if self.config.kv_scorer is not None and self.insertion is not None:
            scores = self.scorers[str(owner)](hidden, norm)
            write_scores(pool, self.insertion.num_pools, scores, slot_mapping)


class UpperGraph(PositionedGraph):
    """Layers above the cut, final norm and LM head, for the survivors only; writes nothing to the cache but what
    an insertion does, and above a blind cut the survivors' K and V."""

    def __init__(
        self,
        config: ModelConfig,
        kv_scales: Sequence[KVScales] = (),
        insertion: CacheInsertion | None = None,
        head: DraftHead | None = None,
        rotates_keys: bool = False,
    ) -> None:
        super().__init__(config, kv_scales, insertion, rotates_keys)
        self.passed = () if head is None else head.passed(config)
        self.layers = make_blocks(config, range(config.cut, config.num_layers))
        self.num_own = config.num_layers - config.cut if config.per_layer_input else 0
        of_head = [config.hidden_size] * len(self.passed)
        if head is not None and head.reads_below(config):
            of_head = [head.width]
        self.widths = [config.hidden_size, *[config.per_layer_input] * self.num_own, *of_head]
        self.norm = RMSNorm(config.hidden_size, config.stream_eps)
        lm_head = Linear(config.hidden_size, config.vocab_size, False, float32_out=True, is_head=True)
        if config.tie_embeddings:
            self.embed = lm_head
        else:
            self.lm_head = lm_head
        self.draft = None if head is None or head.reads_below(config) else HEAD_CODE[head.kind].states(config, head)
        self.register_positions()

    def forward(
        self,
        hidden: Tensor,
        survivor_index: Tensor,
        survivor_start: Tensor,
        positions: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        pools: list[Pool],
        state: tuple[Tensor, ...] = (),
        past_cut: tuple[Tensor, ...] = (),
    ) -> Any:
        """Return fp32 logits ``[R, vocab]`` of the survivors, or ``[L, vocab]`` of some, and ``[R, H]`` for a draft
        head that reads above the cut; the pools then are as an insertion leaves them.

        ``hidden`` ``[T, width_at_cut]`` comes from the lower graph; ``survivor_index`` int32 ``[R]`` selects packed
        tokens, a suffix of each sequence's; ``pools`` are those of ``config.owners_above``, in order. Above a blind cut
        survivors are the tokens that go past it, ``kv_length`` and ``page_table`` are of the caches there, and
        ``past_cut`` are slots int32 ``[R]`` in them, where the survivors' K and V go, and the survivors int32 ``[L]``
        whose logits are asked for (default: all). Where layers above a cut keep a state, what they read of each
        follows in ``pools``, and ``past_cut`` are the survivors' rows int32 ``[R]`` in them.
        """
        config = self.config
        hidden = hidden.index_select(0, survivor_index)
        more: tuple[Tensor, ...] = ()
        survivor_slots, *asked = past_cut if config.is_blind else (None,)
        if len(self.widths) > 1:
            hidden, *more = hidden.split(self.widths, dim=-1)
        streams = {} if self.draft is None else dict(zip(self.passed, more[self.num_own :], strict=True))
        if config.has_cut:
            positions = positions.index_select(0, survivor_index)
            steps = self.steps(positions, survivor_start, kv_length, page_table, state)
            pool_of_owner = dict(zip((*config.owners_above, *config.upper_linear), pools, strict=True))
            reads = None
            if config.linear is not None and config.upper_linear:
                reads = StateReads.of(past_cut[0], config.linear)
            for layer in range(config.cut, config.num_layers):
                block = self.layers[str(layer)]
                if self.draft is not None and layer in self.draft.layers:
                    streams[layer] = hidden
                if config.is_linear(layer):
                    hidden = block.read(hidden, pool_of_owner[layer], reads)
                    continue
                owner = config.owner_of_layer[layer]
                pool = pool_of_owner[owner]
                if survivor_slots is not None and owner == layer:
                    q, *kv = block.project_qkv(hidden)
                    pool = self.write(owner, kv, pool, survivor_slots, steps[layer])
                else:
                    q = block.project_q(hidden)
                own = self.own_pages(steps[layer], owner, pool)
                own_input = more[layer - config.cut] if self.num_own else None
                hidden, pool_of_owner[owner] = block.finish(hidden, q, pool, own, self.kv_scales[owner], own_input)
            pools = [pool_of_owner[owner] for owner in config.owners_above]
        streams[config.num_layers] = hidden
        if asked:
            hidden = hidden.index_select(0, asked[0])
        head = self.embed if config.tie_embeddings else self.lm_head
        logits = divided(config, head(hidden, self.norm))
        logits = logits if config.logit_cap is None else capped(logits, config.logit_cap)
        return self.results(logits, pools) if self.draft is None else (logits, self.draft(streams))


class EarlyExitGraph(nn.Module):
    """The LM head on the hidden state entering the cut layer (appendices E and F). K and V of all layers are written
    by then, so a token may end there."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm_early_exit = RMSNorm(config.hidden_size, config.stream_eps)
        self.lm_head_early_exit = Linear(config.hidden_size, config.vocab_size, False, float32_out=True, is_head=True)

    def forward(self, hidden: Tensor, survivor_index: Tensor) -> Tensor:
        """Return fp32 logits ``[R, vocab]`` of the survivors; arguments as ``UpperGraph``'s."""
        hidden = hidden.index_select(0, survivor_index)
        if hidden.shape[1] > self.config.hidden_size:  # what a draft head reads
            hidden = hidden[:, : self.config.hidden_size]
        logits = self.lm_head_early_exit(hidden, self.norm_early_exit)
        return divided(self.config, logits)


class VerifyGraph(nn.Module):
    """Which drafts of each sequence the model accepts, and the token that follows them; has no weights."""

    def forward(
        self,
        logits: Tensor,
        draft_ids: Tensor,
        draft_start: Tensor,
        draft_probs: Tensor,
        temperature: Tensor,
        uniform: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (accepted, next_token), each int32 ``[S]``; arguments as ``plugins.speculative_verify``'s."""
        return speculative_verify(logits, draft_ids, draft_start, draft_probs, temperature, uniform)
