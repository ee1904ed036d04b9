"""Base and predictor on one micro-batch, to the sums that the loss is made of.

T^2 KL(base || base over the predicted cache), and what the predicted K and V, and the scores of the base's own queries
with the predicted K, are off (arXiv 2410.08391, section 3). Sums over positions, so that any split into micro-batches
adds up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvforge.distill.loss import logit_sums
from kvforge.distill.packing import Batch
from kvforge.prediction.config import PredictConfig
from kvforge.prediction.predictor import KVPredictor
from kvforge.swiftkv import Layout, SwiftKVForCausalLM, make_layout
from kvforge.swiftkv.attention import KV

SUMS = ("kl", "agreement", "k", "v", "qk")
SIZES = ("k", "v", "qk")
"""Sums that are relative to the base's own |K|, |V| and squared scores."""


@dataclass(frozen=True)
class Own:
    """The base's own ``kv`` and queries ``[B, T, heads, head_dim]`` by layer, and its normalised ``output``
    ``[B, T, hidden]``."""

    kv: list[KV]
    q: list[Tensor]
    output: Tensor


class Trainee(nn.Module):
    """A frozen base and the predictor that learns to fill its cache."""

    def __init__(self, base: SwiftKVForCausalLM, predictor: KVPredictor, config: PredictConfig) -> None:
        super().__init__()
        self.base, self.predictor, self.config = base.requires_grad_(False), predictor, config

    def forward(self, batch: Batch, only_sizes: bool = False) -> Tensor:
        """Return fp32 ``[5]``, the sums named in SUMS, of which the first two are over targets, weighted, and the
        others over ``tokens_of`` the batch. With ``only_sizes`` the last three are the base's own sizes, the rest
        0, and the predictor does not run."""
        device = self.base.model.embed_tokens.weight.device
        ids, weight = batch.input_ids.to(device), batch.weight.to(device)
        layout = make_layout(self.base.sizes, ids.shape[1], batch.segments, device)
        real = tokens_of(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.loop.dtype == "bfloat16"):
            own = self._own(ids, layout)
            if only_sizes:
                nothing = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in own.kv]
                return torch.stack((*torch.zeros(2, device=device), *self._errors(nothing, own, real, layout)))
            auxiliary = make_layout(self.predictor.prediction.auxiliary, ids.shape[1], batch.segments, device)
            predicted = self.predictor.predict(self.predictor.inputs(ids, auxiliary), self.base, layout)
            caches = [predicted[owner] for owner in self.base.sizes.owner_of_layer]
            output = self._over(caches, ids, layout, weight > 0)
            chosen = weight > 0
            config, sizes = self.config.loop, self.base.sizes
            kl, _, agreement = logit_sums(
                output[chosen],
                own.output[chosen],
                None,
                weight[chosen],
                self.base.head,
                self.base.head,
                self.base.head,
                config.temperature,
                sizes.vocab_size,
            )
        errors = self._errors(caches, own, real, layout)
        return torch.stack((kl, agreement, *errors))

    @torch.no_grad()
    def _own(self, ids: Tensor, layout: Layout) -> Own:
        hidden, caches, queries = self.base.model.embed(ids), [], []
        for layer in self.base.model.layers:
            x = layer.input_layernorm(hidden)
            caches.append(layer.self_attn.key_value(x, layout))
            queries.append(layer.self_attn.query(x, layout))
            hidden = layer(hidden, caches[-1], layout)
        return Own(caches, queries, self.base.model.norm(hidden))

    def _over(self, caches: list[KV], ids: Tensor, layout: Layout, targets: Tensor) -> Tensor:
        """Return the base's normalised output ``[B, T, hidden]`` over predicted caches."""
        hidden, exact = self.base.model.embed(ids), targets[..., None, None]
        for layer, kv in zip(self.base.model.layers, caches, strict=True):
            if self.config.exact_targets:
                k, v = layer.self_attn.key_value(layer.input_layernorm(hidden), layout)
                kv = torch.where(exact, k.to(kv[0].dtype), kv[0]), torch.where(exact, v.to(kv[1].dtype), kv[1])
            hidden = layer(hidden, kv, layout)
        return self.base.model.norm(hidden)

    def _errors(self, caches: list[KV], own: Own, real: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums over tokens of mean |K| and |V| errors and of the mean squared errors of the scores that a
        token sees, each on average over layers."""
        sums = [torch.zeros((), device=real.device) for _ in SIZES]
        for index, ((k, v), (own_k, own_v), q) in enumerate(zip(caches, own.kv, own.q, strict=True)):
            attention = self.base.model.layers[index].self_attn
            for place, off in enumerate((k - own_k, v - own_v)):
                sums[place] = sums[place] + (off.float().abs().mean((-1, -2)) * real).sum()
            mask = layout.masks[attention.window]
            sums[2] = sums[2] + self._score_errors(k - own_k, q, mask, real, attention.scale)
        k_sum, v_sum, qk_sum = (each / len(caches) for each in sums)
        return k_sum, v_sum, qk_sum

    def _score_errors(self, off: Tensor, q: Tensor, mask: Tensor | None, real: Tensor, scale: float) -> Tensor:
        """Return the sum over tokens of the mean squared error of the scores of those they attend to, as
        ``num_queries`` of them tell. ``off`` is the error of rotated K ``[B, T, kv_heads, head_dim]``."""
        length = q.shape[1]
        step = max(1, length // self.config.num_queries)
        rows = torch.arange(step - 1, length, step, device=q.device)
        errors = off.float().repeat_interleave(q.shape[2] // off.shape[2], dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows].float(), errors) * scale
        if mask is None:
            mask = (rows[:, None] >= torch.arange(length, device=q.device))[None, None]
        else:
            mask = mask[:, :, rows]
        squares = (scores.square() * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        return (squares.mean(1) * real[:, rows]).sum() * (real.sum() / real[:, rows].sum().clamp(min=1))


def tokens_of(batch: Batch) -> Tensor:
    """Return bool ``[B, T]``: the tokens of samples. Padding is the segment without a target."""
    weights = torch.zeros(batch.weight.shape[0], int(batch.segments.max()) + 1)
    return weights.scatter_add(1, batch.segments, batch.weight).gather(1, batch.segments) > 0
