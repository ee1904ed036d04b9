"""Random EAGLE-3 heads in the published layout, random modules for multi-token prediction, and what such heads compute,
in plain torch."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.runtime import LLMEngine
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.swiftkv import load_model
from model_defs import families
from model_defs.mtp import mtp_head
from model_defs.mtp_graph import mtp_weight_specs
from model_defs.reference import reference_hidden

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}


def make_head(path: Path, target: Path, *, draft_vocab: int = 50, seed: int = 0, table: bool = False, **fields) -> Path:
    """Write a head for the checkpoint ``target``, with an embedding of its own with ``table``; ``fields`` go into its
    config.json, those that are None are left out."""
    model = json.loads((target / "config.json").read_text())
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    config = {
        **SIZES,
        "hidden_size": hidden,
        "head_dim": 16,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        **fields,
    }
    width, head_dim = config["hidden_size"], config["head_dim"]
    q_dim, kv_dim = (config[f"num_{one}_heads"] * head_dim for one in ("attention", "key_value"))
    inner = config["intermediate_size"]
    shapes = {
        "fc": (width, 3 * hidden),
        "midlayer.self_attn.q_proj": (q_dim, 2 * width),
        "midlayer.self_attn.k_proj": (kv_dim, 2 * width),
        "midlayer.self_attn.v_proj": (kv_dim, 2 * width),
        "midlayer.self_attn.o_proj": (width, q_dim),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "midlayer.hidden_norm": (width,),
        "midlayer.input_layernorm": (width,),
        "midlayer.post_attention_layernorm": (width,),
        "norm": (width,),
        "lm_head": (draft_vocab, width),
    } | ({"embed_tokens": (vocab, width)} if table else {})
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.3)
        weights[f"{name}.weight"] = 1 + noise if len(shape) == 1 else noise
    if draft_vocab != vocab:
        tokens = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        weights["d2t"] = tokens - torch.arange(draft_vocab)
        weights["t2d"] = torch.isin(torch.arange(vocab), tokens)
    path.mkdir()
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def draft_only(head: Path, tokens: Iterable[int]) -> Path:
    """Let a head draft these tokens alone, as many as it drafts anyhow: those of a text are often right."""
    weights, chosen = load_file(head / "model.safetensors"), torch.tensor(sorted(tokens))
    weights["d2t"] = chosen - torch.arange(len(weights["d2t"]))
    weights["t2d"] = torch.isin(torch.arange(len(weights["t2d"])), chosen)
    save_file(weights, head / "model.safetensors", metadata={"format": "pt"})
    return head


def noted_drafts(engine: LLMEngine) -> list[tuple[list[int], list[int]]]:
    """Return a list that an engine's steps add to: tokens of a sequence, and the drafts behind them."""
    seen: list[tuple[list[int], list[int]]] = []
    head = engine.runner.head_draft
    run = head.draft

    def draft(plan: Schedule, slots: SlotTable) -> None:
        run(plan, slots)
        seen.extend((s.tokens[: s.length].tolist(), list(found)) for s, found in plan.drafts.items())

    head.draft = draft
    return seen


def streams(target: Path, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """Return ``[T, 3 hidden]``: the residual streams that enter these layers of a checkpoint; of a plain one as
    transformers computes it."""
    sizes = read_model_config(checkpoint := open_model(target))
    if sizes.has_cut:
        cut, found = load_model(checkpoint, sizes, torch.float32), dict[int, Tensor]()
        for index, layer in enumerate(cut.model.layers):
            layer.register_forward_pre_hook(lambda _, given, index=index: found.update({index: given[0][0]}))
        with torch.inference_mode():
            cut(torch.tensor([tokens]))
        return torch.cat([found[layer] for layer in layers], dim=-1)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


class ReferenceHead:
    """A head without a cache: every draft runs it over all entries."""

    def __init__(self, path: Path, target: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = load_file(path / "model.safetensors")
        shared = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        self.table = self.weights.get("embed_tokens.weight", shared)

    def draft(
        self, tokens: list[int], states: Tensor, count: int, first: int = 0, kept: list[int] | None = None
    ) -> list[int]:
        """Return ``count`` drafts behind ``tokens``, of which all but the last have ``states`` ``[T - 1, 3 hidden]``;
        the entries are those of tokens from ``first`` on, or of the positions ``kept``."""
        kept = list(range(first, len(tokens) - 1)) if kept is None else kept
        hidden = self._linear(states[kept], "fc")
        drafts: list[int] = []
        added = self.weights.get("d2t")
        for _ in range(count):
            places = kept + list(range(len(tokens) - 1, len(tokens) + len(drafts) - 1))
            output = self._layer([(tokens + drafts)[place + 1] for place in places], hidden, torch.tensor(places))
            best = int((self._norm(output[-1], "norm") @ self.weights["lm_head.weight"].T).argmax())
            drafts.append(best if added is None else best + int(added[best]))
            hidden = torch.cat((hidden, output[-1:]))
        return drafts

    def _layer(self, ids: list[int], hidden: Tensor, positions: Tensor) -> Tensor:
        normed = self._norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((self._norm(self.table[ids], "midlayer.input_layernorm"), normed), dim=-1)
        stream = normed if self.config.get("norm_before_residual") else hidden
        count, dim = len(ids), self.config["head_dim"]
        q, k, v = (self._linear(x, f"midlayer.self_attn.{one}_proj").view(count, -1, dim) for one in "qkv")
        angles = torch.outer(
            positions.float(),
            self.config["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim),
        ).repeat(1, 2)[:, None]
        q, k = (each * angles.cos() + _half_turned(each) * angles.sin() for each in (q, k))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)
        stream = stream + self._linear(attended.flatten(1), "midlayer.self_attn.o_proj")
        y = self._norm(stream, "midlayer.post_attention_layernorm")
        inner = F.silu(self._linear(y, "midlayer.mlp.gate_proj")) * self._linear(y, "midlayer.mlp.up_proj")
        return stream + self._linear(inner, "midlayer.mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])


def _half_turned(x: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat((-other, one), dim=-1)


def add_mtp(path: Path, *, leave_out: str = "", seed: int = 0) -> Path:
    """Give a checkpoint a random module for multi-token prediction, without the tensors that ``leave_out`` names."""
    config, file = read_model_config(open_model(path)), path / "model.safetensors"
    generator, weights = torch.Generator().manual_seed(seed), load_file(file)
    for spec in mtp_weight_specs(config, mtp_head(config)):
        for source in spec.sources:
            if source.name not in weights and not (leave_out and re.search(leave_out, source.name)):
                noise = torch.randn(source.shape, generator=generator) * 0.2
                weights[source.name] = 1 + noise if "norm" in source.name else noise
    save_file(weights, file, metadata={"format": "pt"})
    (path / "config.json").write_text(
        json.dumps(json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1})
    )
    return path


class ReferenceModule:
    """A module for multi-token prediction without a cache, in float32 (arXiv 2412.19437, section 2.2): every draft runs
    it over all entries."""

    def __init__(self, path: Path) -> None:
        self.target = read_model_config(open_model(path))
        layout = families()[self.target.model_type].mtp
        self.prefix, self.layout, self.weights = (
            layout.prefix_of(self.target),
            layout,
            load_file(path / "model.safetensors"),
        )
        tied = "model.embed_tokens" if self.target.tie_embeddings else "lm_head"
        self.table = self._own(layout.embedding, "model.embed_tokens")
        self.lm_head = self._own(layout.lm_head, tied)
        start = f"{self.prefix}{layout.layer}"
        own = {name: each for name, each in self.weights.items() if name.startswith(start)}
        self.layer = {name.replace(start, "model.layers.0.", 1): each for name, each in own.items()}

    def states(self, tokens: list[int]) -> Tensor:
        """Return what the module reads of the model, ``[T, hidden]``."""
        return self._norm(reference_hidden(self.target, self.weights, torch.tensor(tokens))[-1], "model.norm")

    def draft(self, tokens: list[int], count: int, first: int = 0) -> list[int]:
        """Return ``count`` drafts behind ``tokens``; the entries are those of tokens from ``first`` on."""
        hidden, drafts, layout = self.states(tokens[:-1])[first:], list[int](), self.layout
        for _ in range(count):
            embedded = self._norm(self.table[(tokens + drafts)[first + 1 :]], self.prefix + layout.embedding_norm)
            pair = torch.cat((embedded, self._norm(hidden, self.prefix + layout.hidden_norm)), dim=-1)
            inputs = pair @ self.weights[f"{self.prefix}{layout.projection}.weight"].T
            layer = self.layer | {"model.embed_tokens.weight": inputs}  # token i of it is entry i
            stream = reference_hidden(mtp_head(self.target).model, layer, torch.arange(len(inputs)))[-1]
            normed = self._norm(stream[-1:], self.prefix + layout.norm)
            drafts.append(int((normed @ self.lm_head.T).argmax()))
            hidden = torch.cat((hidden, normed))
        return drafts

    def _own(self, name: str, otherwise: str) -> Tensor:
        return self.weights.get(f"{self.prefix}{name}.weight", self.weights[f"{otherwise}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.weights[f"{name}.weight"] + self.target.norm_offset
        return F.rms_norm(x, x.shape[-1:], gain, self.target.rms_norm_eps)
