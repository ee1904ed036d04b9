"""ShadowKV (arXiv 2410.21465, sections 4.1 and 4.2) in plain torch, float64: one sequence, loops and lists.

There are no pages, pools, hits or batches here; a step computes from all keys what the definition says.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.rope import inverse_frequencies, rope_cos_sin
from model_defs.rope_config import RopeConfig


@dataclass(frozen=True)
class Parameters:
    """What ``kvforge build --kv-policy shadowkv`` takes; budget and local window in tokens."""

    rank: int
    sparse_budget: int
    num_outlier_chunks: int
    chunk_size: int = 8
    num_local_tokens: int = 32

    def num_chunks(self, length: int) -> int:
        """Chunks of a prompt of ``length`` tokens; the tail after them stays exact."""
        return max(0, length - self.num_local_tokens) // self.chunk_size

    def approximates(self, length: int) -> bool:
        """Whether something of a prompt of ``length`` tokens is left out of attention."""
        return self.num_chunks(length) > self.num_outlier_chunks + self.sparse_budget // self.chunk_size


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate ``[n, heads, d]`` at ``positions`` ``[n]``; angles are float32, as in the model."""
    cos, sin = (table.double()[:, None, :] for table in rope_cos_sin(positions, frequencies))
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def low_rank(x: Tensor, rank: int) -> Tensor:
    """The best approximation of the matrix ``x`` of this rank, by its singular value decomposition."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


class ShadowCache:
    """The cache of one owner and sequence after an exact prefill.

    ``keys`` and ``values`` are ``[S, kv_heads, d]``, keys not rotated. With ``factored`` False all of them stay exact
    and attended.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, frequencies: Tensor, parameters: Parameters, factored: bool = True
    ) -> None:
        self.parameters, self.frequencies = parameters, frequencies
        length, num_kv_heads, _ = keys.shape
        positions = torch.arange(length)
        self.keys, self.values = rotate(keys, positions, frequencies), values.double()
        self.num_chunks = parameters.num_chunks(length) if factored else 0
        if not self.num_chunks:
            return
        self.approximate_keys = rotate(low_rank(keys.flatten(1), parameters.rank).view_as(keys), positions, frequencies)
        self.landmarks: list[list[Tensor]] = []
        self.outliers: list[list[int]] = []
        for head in range(num_kv_heads):
            landmarks, cosines = [], []
            for chunk in range(self.num_chunks):
                inside = self.keys[self._tokens(chunk), head]
                landmarks.append(inside.mean(0))
                cosines.append(min(float(F.cosine_similarity(key, landmarks[-1], dim=0)) for key in inside))
            order = sorted(range(self.num_chunks), key=lambda chunk: (cosines[chunk], chunk))
            self.landmarks.append(landmarks)
            self.outliers.append(sorted(order[: parameters.num_outlier_chunks]))

    def _tokens(self, chunk: int) -> list[int]:
        first = chunk * self.parameters.chunk_size
        return list(range(first, first + self.parameters.chunk_size))

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add a generated token's key, not rotated, and value, each ``[kv_heads, d]``."""
        position = torch.tensor([len(self.keys)])
        self.keys = torch.cat((self.keys, rotate(key[None], position, self.frequencies)))
        self.values = torch.cat((self.values, value[None].double()))

    def scores(self, q: Tensor, head: int) -> dict[int, float]:
        """The score of each chunk that may be selected, for rotated ``q`` ``[heads, d]`` and a KV head."""
        group = q.shape[0] // self.keys.shape[1]
        choices = [chunk for chunk in range(self.num_chunks) if chunk not in self.outliers[head]]
        if not choices:
            return {}
        landmarks = torch.stack([self.landmarks[head][chunk] for chunk in choices])
        best = torch.zeros(len(choices), dtype=torch.float64)
        for query in q[head * group : (head + 1) * group].double():
            best = torch.maximum(best, ((landmarks @ query) * q.shape[1] ** -0.5).softmax(0))
        return dict(zip(choices, best.tolist(), strict=True))

    def select(self, q: Tensor, head: int) -> list[int]:
        """The chunks that a KV head attends through their approximate keys, ascending."""
        scores = self.scores(q, head)
        order = sorted(scores, key=lambda chunk: (-scores[chunk], chunk))
        return sorted(order[: self.parameters.sparse_budget // self.parameters.chunk_size])

    def attend(self, q: Tensor, selected: list[list[int]] | None = None) -> Tensor:
        """Attention ``[heads, d]`` of rotated ``q`` ``[heads, d]``, the newest token's; ``selected`` chunks of each KV
        head instead of its own choice."""
        num_kv_heads, out = self.keys.shape[1], []
        group = q.shape[0] // num_kv_heads
        for head in range(num_kv_heads):
            exact = list(range(self.num_chunks * self.parameters.chunk_size, len(self.keys)))
            keys, values = [], []
            if self.num_chunks:
                for chunk in self.outliers[head]:
                    exact += self._tokens(chunk)
                for chunk in self.select(q, head) if selected is None else selected[head]:
                    keys.append(self.approximate_keys[self._tokens(chunk), head])
                    values.append(self.values[self._tokens(chunk), head])
            k = torch.cat([*keys, self.keys[exact, head]])
            v = torch.cat([*values, self.values[exact, head]])
            for query in q[head * group : (head + 1) * group].double():
                out.append(((k @ query) * q.shape[1] ** -0.5).softmax(0) @ v)
        return torch.stack(out)


def exact_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of rotated ``q`` ``[n, heads, d]`` over as many rotated keys and values ``[n, kv_heads, d]``."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[2] ** -0.5
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


class ShadowModel:
    """A model of ``model_defs`` with an exact prefill and sparse decoding of one sequence.

    ``weights`` are a checkpoint's, by their Hugging Face names. A prompt of which nothing would be left out is
    attended exactly.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], parameters: Parameters) -> None:
        self.config, self.parameters = config, parameters
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        rope: RopeConfig = config.rope
        self.frequencies = inverse_frequencies(rope, config.head_dim)

    def logits(self, prompt: list[int], generated: list[int]) -> Tensor:
        """Logits ``[1 + len(generated), vocab]`` after the prompt and after each generated token."""
        self.caches: dict[int, ShadowCache] = {}
        rows = [self._forward(prompt, 0)[-1]]
        for index, token in enumerate(generated):
            rows.append(self._forward([token], len(prompt) + index)[-1])
        return torch.stack(rows)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            self.weights[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        )

    def _heads(self, x: Tensor, name: str, norm: str | None) -> Tensor:
        y = self._linear(x, name).unflatten(-1, (-1, self.config.head_dim))
        return self._norm(y, norm) if norm is not None and self.config.qk_norm else y

    def _attend(self, owner: int, q: Tensor, start: int, kv: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of ``[n, heads, d]``; ``kv`` of these tokens where this layer owns a cache."""
        if start == 0:
            if kv is not None:
                factored = self.parameters.approximates(len(q))
                self.caches[owner] = ShadowCache(*kv, self.frequencies, self.parameters, factored)
            cache = self.caches[owner]
            return exact_attention(q, cache.keys, cache.values)
        if kv is not None:
            self.caches[owner].append(kv[0][0], kv[1][0])
        return self.caches[owner].attend(q[0])[None]

    def _forward(self, tokens: list[int], start: int) -> Tensor:
        config = self.config
        positions = torch.arange(start, start + len(tokens))
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer, owner in enumerate(config.owner_of_layer):
            name, above = f"model.layers.{layer}", layer >= config.cut
            attention, suffix = f"{name}.self_attn", "_swiftkv" if above else ""
            if layer == config.cut:
                single_input = self._norm(hidden, "model.norm_swiftkv")
            x = self._norm(hidden, f"{name}.input_layernorm")
            q = self._heads(x, f"{attention}.q_proj{suffix}", f"{attention}.q_norm{suffix}")
            kv = None
            if owner == layer:
                source = single_input if above else x
                key = self._heads(source, f"{attention}.k_proj{suffix}", f"{attention}.k_norm{suffix}")
                kv = key, self._heads(source, f"{attention}.v_proj{suffix}", None)
            attended = self._attend(owner, rotate(q, positions, self.frequencies), start, kv)
            hidden = hidden + self._linear(attended.flatten(1), f"{attention}.o_proj")
            x = self._norm(hidden, f"{name}.post_attention_layernorm")
            inner = F.silu(self._linear(x, f"{name}.mlp.gate_proj")) * self._linear(x, f"{name}.mlp.up_proj")
            hidden = hidden + self._linear(inner, f"{name}.mlp.down_proj")
        head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
        return self._linear(self._norm(hidden, "model.norm"), head)
