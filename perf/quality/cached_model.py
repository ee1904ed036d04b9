"""A model in plain torch with its cache in the open, so that what is cached can be changed. A definition, not fast."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvforge.rewire.minicache import distance, merge, threshold
from kvforge.swiftkv import Layout, SwiftKVForCausalLM, make_layout

KV = tuple[Tensor, Tensor]
"""Rotated K, and V, each ``[B, T, kv_heads, head_dim]``."""
Change = Callable[[dict[int, KV], bool], dict[int, KV]]
"""From a piece's K and V by owner, and whether the piece is the prompt, to what later tokens read of it."""


def unchanged(kv: dict[int, KV], is_prompt: bool) -> dict[int, KV]:
    """Return ``kv``: later tokens read what the layers made."""
    return kv


class CachedModel:
    """Sequences of one length that are computed piece by piece in float32.

    ``change`` makes what the cache holds once a piece is computed. A piece reads its own K and V as they were.
    """

    def __init__(
        self,
        model: SwiftKVForCausalLM,
        change: Change = unchanged,
    ) -> None:
        self.model, self.change = model, change
        self.past: dict[int, KV] = {}

    @property
    def length(self) -> int:
        """Tokens computed so far."""
        return next(iter(self.past.values()))[0].shape[1] if self.past else 0

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Compute the next piece ``[B, T]``; returns its logits ``[B, T, vocab]``."""
        decoder, config, start = self.model.model, self.model.sizes, self.length
        layout = self._layout(start, ids.shape[1])
        new: dict[int, KV] = {}
        hidden, single = decoder.embed(ids), None
        for index, layer in enumerate(decoder.layers):
            if index == config.cut and config.is_swiftkv:
                single = decoder.norm_swiftkv(hidden)
            owner = config.owner_of_layer[index]
            if owner == index:
                own = layer.input_layernorm(hidden) if single is None else single
                new[owner] = layer.self_attn.key_value(own, layout)
            hidden = layer(hidden, self._joined(owner, new[owner]), layout)
        changed = self.change(new, start == 0)
        self.past = {owner: self._joined(owner, kv) for owner, kv in changed.items()}
        return self.model.head(decoder.norm(hidden))

    def _joined(self, owner: int, new: KV) -> KV:
        if owner not in self.past:
            return new
        k, v = (torch.cat(pair, 1) for pair in zip(self.past[owner], new, strict=True))
        return k, v

    def _layout(self, start: int, num: int) -> Layout:
        """Return the layout of ``num`` tokens from position ``start`` on, which see all before them."""
        layout = make_layout(self.model.sizes, start + num)
        visible = torch.ones(num, start + num, dtype=torch.bool).tril(start)
        rotations = {
            rope: replace(each, cos=each.cos[:, start:], sin=each.sin[:, start:])
            for rope, each in layout.rotations.items()
        }
        return replace(layout, rotations=rotations, masks=dict.fromkeys(layout.masks, visible))


class MergedPairs:
    """MiniCache of layers ``first`` and up in pairs, for ``CachedModel``: each KV head's vectors of a token are merged
    with those of the next layer. The prompt's distances decide, by sequence, layer pair, head, and K or V, which later
    vectors are retained. With ``average`` a pair's vectors are averaged instead, lengths and all, and none retained."""

    def __init__(self, first: int, interpolation: float, retention: float, average: bool = False) -> None:
        self.first, self.interpolation, self.retention, self.average = first, interpolation, retention, average
        self.limits: dict[tuple[int, int], Tensor] = {}
        self.num_retained = self.num_merged = 0
        self.distances: list[Tensor] = []

    def __call__(self, kv: dict[int, KV], is_prompt: bool) -> dict[int, KV]:
        """Return what is restored of the K and V of all layers."""
        changed = dict(kv)
        for lower in range(self.first, len(kv) - 1, 2):
            pairs = [self._pair(lower, half, kv[lower][half], kv[lower + 1][half], is_prompt) for half in (0, 1)]
            changed[lower], changed[lower + 1] = tuple(zip(*pairs, strict=True))  # type: ignore[assignment]
        return changed

    def _pair(self, lower: int, half: int, a: Tensor, b: Tensor, is_prompt: bool) -> KV:
        if self.average:
            self.num_merged += a[..., 0].numel()
            return (a + b) / 2, (a + b) / 2
        if is_prompt:
            far = distance(a, b)
            self.distances.append(far.flatten())
            self.limits[lower, half] = threshold(far, self.retention, dim=1)
        merged = merge(a, b, self.interpolation, self.limits[lower, half])
        self.num_retained += int(merged.retained.sum())
        self.num_merged += merged.retained.numel()
        return merged.restore(a, b)

    @property
    def retained_share(self) -> float:
        """The share of pairs of vectors that were retained."""
        return self.num_retained / max(self.num_merged, 1)


def divergence(model: CachedModel, ids: Tensor, teacher_logits: Tensor, num_prompt: int) -> tuple[Tensor, Tensor]:
    """Feed documents ``[B, T]``: a prompt of ``num_prompt`` tokens, then token by token where cached ones change.

    Returns KL(teacher || model) in nats and whether the likeliest tokens agree, each ``[B, T - num_prompt]``, of the
    tokens after the prompt; ``teacher_logits`` ``[B, T, vocab]`` are of the same documents.
    """
    model(ids[:, :num_prompt])
    size = ids.shape[1] - num_prompt if model.change is unchanged else 1
    kl, same = [], []
    for piece, expected in zip(
        ids[:, num_prompt:].split(size, 1), teacher_logits[:, num_prompt:].split(size, 1), strict=True
    ):
        log_p, log_q = expected.double().log_softmax(-1), model(piece).double().log_softmax(-1)
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
        same.append(log_p.argmax(-1) == log_q.argmax(-1))
    return torch.cat(kl, 1), torch.cat(same, 1)


def answers(
    make: Callable[[], CachedModel], prompts: Sequence[Sequence[int]], max_tokens: int, ends: frozenset[int]
) -> list[list[int]]:
    """Return the greedy tokens after each prompt, up to one of ``ends``; prompts of one length are a batch."""
    found: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        chosen = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        model, open_rows = make(), set(chosen)
        logits = model(torch.tensor([list(prompts[index]) for index in chosen]))[:, -1]
        for _ in range(max_tokens):
            tokens = logits.argmax(-1)
            for row, index in enumerate(chosen):
                if index in open_rows:
                    found[index].append(int(tokens[row]))
                    if int(tokens[row]) in ends:
                        open_rows.discard(index)
            if not open_rows:
                break
            logits = model(tokens[:, None])[:, -1]
    return found
