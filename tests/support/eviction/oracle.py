"""The oracle of eviction: one sequence, token by token, float64, brute force over lists of entries.

It shares with the product the model's configuration and the 8-bit number formats, and no code of a KV policy.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from model_defs import ModelConfig
from model_defs.rope import inverse_frequencies
from plugins.kv_quantization import LARGEST, dynamic_scale, quantize
from tests.support.eviction.budgets import BUDGETS, Budgets
from tests.support.eviction.calendar import calendar
from tests.support.eviction.entries import Entry, Eviction, Lane, Look, Moment, Trace
from tests.support.eviction.rules import ALL, RULES, observed, probes
from tests.support.eviction.selection import choose


class _Sequence:
    """One sequence: the lanes of every owner, and the model that adds to them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kv_dtype: torch.dtype | None,
        kv_scales: Sequence[tuple[float, float]],
    ) -> None:
        self.config, self.kv_dtype, self.is_probing = config, kv_dtype, False
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.scales = dict(zip(config.owners, kv_scales, strict=True)) if kv_scales else {}
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).double()
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}  # cosines and sines by position
        self.cosines: dict[int, dict[int, float]] = {owner: {} for owner in config.owners}
        self.lanes: dict[int, list[Lane]] = {owner: [[] for _ in range(config.num_kv_heads)] for owner in config.owners}

    def compute(self, token: int, position: int, survives: bool) -> Tensor | None:
        """Return the logits ``[vocab]`` of one more token. One that does not survive a cut has none: above it, only its
        K and V are written."""
        config = self.config
        hidden = self.weights["model.embed_tokens.weight"][token]
        single_input = hidden
        for layer, owner in enumerate(config.owner_of_layer):
            prefix = f"model.layers.{layer}"
            above = layer >= config.cut
            if layer == config.cut:
                single_input = self._norm(hidden, "model.norm_swiftkv")
            x = self._norm(hidden, f"{prefix}.input_layernorm")
            if layer == owner:
                self._write(owner, single_input if above else x, position, "_swiftkv" if above else "")
            if above and not survives:
                continue
            q = self._heads(x, f"{prefix}.self_attn.q", "_swiftkv" if above else "", normed=True)
            if layer == owner:
                for lane, queries in zip(self.lanes[owner], q.chunk(config.num_kv_heads), strict=True):
                    lane[-1].queries = queries
            attended = self._attend(self.rotate(q, position), owner, position)
            before, hidden = hidden, hidden + self._linear(attended, f"{prefix}.self_attn.o_proj")
            if layer == owner:
                self.cosines[owner][position] = float(before @ hidden / (before.norm() * hidden.norm()))
            x = self._norm(hidden, f"{prefix}.post_attention_layernorm")
            gate, up = self._linear(x, f"{prefix}.mlp.gate_proj"), self._linear(x, f"{prefix}.mlp.up_proj")
            hidden = hidden + self._linear(F.silu(gate) * up, f"{prefix}.mlp.down_proj")
        if config.is_swiftkv and not survives:
            return None
        head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
        return self._linear(self._norm(hidden, "model.norm"), head)

    def evict(self, rule: str, keep: int, now: Moment) -> Eviction:
        """Keep ``keep`` entries of every lane, or as many on average where lanes share a budget."""
        choices = {}
        rankings = [[RULES[rule](lanes, head, now) for head in range(len(lanes))] for lanes in self.lanes.values()]
        equal = [Budgets([keep] * len(lanes)) for lanes in self.lanes.values()]
        budgets = BUDGETS[rule](list(self.lanes.values()), rankings, keep, now) if rule in BUDGETS else equal
        for (owner, lanes), ranked, budget in zip(self.lanes.items(), rankings, budgets, strict=True):
            for head, (lane, ranking) in enumerate(zip(lanes, ranked, strict=True)):
                choices[owner, head] = choose(lane, ranking, budget.tokens[head], budget.slack)
        for (owner, head), choice in choices.items():
            lane = self.lanes[owner][head]
            lane[:] = [entry for entry in lane if entry.position in choice.kept]
        return Eviction(now.computed, choices)

    def probe(self, ids: Sequence[int], position: int) -> None:
        """Compute tokens behind those that there are; what remains of them is how they look at these."""
        lengths = {owner: len(lanes[0]) for owner, lanes in self.lanes.items()}
        self.is_probing = True
        for index, token in enumerate(ids):
            self.compute(token, position + index, survives=True)
        self.is_probing = False
        for owner, lanes in self.lanes.items():
            for lane in lanes:
                del lane[lengths[owner] :]

    def turn_sinks(self, sinks: int, num_evicted: int) -> None:
        """Rotate the first positions on, so that their distance from what follows is that inside the cache."""
        for owner, lanes in self.lanes.items():
            entries = [entry for lane in lanes for entry in lane if entry.position < sinks]
            for entry in entries:
                turned = self.rotate(entry.raw_key[None], entry.position + num_evicted)
                entry.key = self._cached(turned, owner, of_value=False)[0]

    def _write(self, owner: int, source: Tensor, position: int, suffix: str) -> None:
        attention = f"model.layers.{owner}.self_attn"
        raw = self._heads(source, f"{attention}.k", suffix, normed=True)
        keys = self._cached(self.rotate(raw, position), owner, of_value=False)
        values = self._cached(self._heads(source, f"{attention}.v", suffix, normed=False), owner, of_value=True)
        predicted = self._predict(owner, source)
        for head, lane in enumerate(self.lanes[owner]):
            lane.append(Entry(position, raw[head], keys[head], values[head], predicted=predicted[head]))

    def _predict(self, owner: int, source: Tensor) -> list[float]:
        """What a scorer of KVzap says of a token, for each KV head, to 1/4096; 0 where there is none."""
        name = f"kvzap.layers.{self.config.owners.index(owner)}"
        if f"{name}.0.weight" in self.weights:
            source, name = F.gelu(self._linear(source, f"{name}.0")), f"{name}.2"
        if f"{name}.weight" not in self.weights:
            return [0.0] * self.config.num_kv_heads
        return ((self._linear(source, name) * 4096).round() / 4096).tolist()

    def _attend(self, q: Tensor, owner: int, position: int) -> Tensor:
        """Attention of ``[heads, head_dim]`` over the lanes of an owner; every entry remembers what it was given."""
        attended = []
        for lane, group in zip(self.lanes[owner], q.chunk(self.config.num_kv_heads), strict=True):
            scores = group @ torch.stack([entry.key for entry in lane]).T
            weights = (scores * self.config.head_dim**-0.5).softmax(-1)
            attended.append(weights @ torch.stack([entry.value for entry in lane]))
            if self.is_probing:
                for entry, largest in zip(lane, weights.amax(0).tolist(), strict=True):
                    entry.probed = max(entry.probed, largest)
            else:
                for entry, weight in zip(lane, weights.mean(0).tolist(), strict=True):
                    entry.looks.append(Look(position, weight, len(lane)))
        return torch.cat(attended).flatten()

    def _cached(self, x: Tensor, owner: int, of_value: bool) -> Tensor:
        """Return what a cache gives back of K or V ``[kv_heads, head_dim]``."""
        if self.kv_dtype is None:
            return x
        if self.kv_dtype not in LARGEST:
            return x.to(self.kv_dtype).double()
        static = self.scales.get(owner)
        scale = dynamic_scale(x, self.kv_dtype)[:, None] if static is None else torch.tensor(static[of_value])
        return (quantize(x, scale, self.kv_dtype).float() * scale).double()

    def _heads(self, x: Tensor, name: str, suffix: str, normed: bool) -> Tensor:
        y = self._linear(x, f"{name}_proj{suffix}").unflatten(0, (-1, self.config.head_dim))
        return self._norm(y, f"{name}_norm{suffix}") if normed and self.config.qk_norm else y

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return self.weights[f"{name}.weight"] * x / (mean_square + self.config.rms_norm_eps).sqrt()

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """Rotate ``[heads, head_dim]``: element i and i + head_dim/2 are the two sides of a plane."""
        if position not in self._turns:
            angles = position * self._frequencies
            self._turns[position] = angles.cos(), angles.sin()
        cosines, sines = self._turns[position]
        one, other = x.chunk(2, dim=-1)
        return torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1)


@torch.no_grad()
def run(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    prompt_ids: Sequence[int],
    forced_ids: Sequence[int],
    rule: str,
    budget: int,
    block: int,
    *,
    kv_dtype: torch.dtype | None = None,
    kv_scales: Sequence[tuple[float, float]] = (),
    page_size: int = 1,
    **parameters: int,
) -> Trace:
    """Return what ``rule`` keeps of a prompt and of the tokens generated after it, and the logits.

    ``weights`` are a checkpoint's tensors by their Hugging Face names. ``forced_ids`` are the generated tokens. A cache
    of ``kv_dtype`` gives K and V back as it does in ``model_defs.reference``, with ``kv_scales`` of each owner or one
    per token and head; None keeps them exact. ``block`` does not matter to a rule that evicts once, ``page_size`` only
    to one whose heads share a budget.

    Raises:
        ValueError: an unknown rule, a block that is not below the budget, no prompt, a sliding window, or a cut with a
            rule that observes all queries.
    """
    ids, num_prompt = [*prompt_ids, *forced_ids], len(prompt_ids)
    due = dict(calendar(rule, num_prompt, len(ids), budget, block, **parameters))
    watched = observed(rule, parameters)
    if not num_prompt:
        raise ValueError("The prompt has no token; give one at least.")
    if any(config.layer_windows):
        raise ValueError("A layer has a sliding window; eviction is for full attention.")
    if config.is_swiftkv and watched == ALL:
        raise ValueError(f"{rule} observes all queries; above a cut, prompt tokens have none.")
    first_survivor = num_prompt - max(watched, 1)
    sequence = _Sequence(config, weights, kv_dtype, kv_scales)
    evictions: list[Eviction] = []
    logits = []
    for position, token in enumerate(ids):
        if position in due:
            for probe in probes(rule, ids[:num_prompt], parameters):
                sequence.probe(probe, position)
            previous = evictions[-1].computed if evictions else 0
            numbers = position, previous, num_prompt, budget, parameters, page_size
            now = Moment(*numbers, sequence.cosines, ids, sequence.rotate)
            evictions.append(sequence.evict(rule, due[position], now))
            if rule == "streaming":
                sequence.turn_sinks(parameters.get("sinks", 4), position - due[position])
        row = sequence.compute(token, position, survives=position >= first_survivor)
        if row is not None and position >= num_prompt - 1:
            logits.append(row)
    return Trace(tuple(evictions), torch.stack(logits))
