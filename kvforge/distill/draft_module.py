"""An EAGLE-3 head as a differentiable module, whose parameters have the names of published heads."""

import torch
from torch import Tensor, nn

from kvforge.swiftkv.model import MLP
from kvforge.swiftkv.token_layout import Rotation
from model_defs.draft_head import NUM_STATES, DraftHead
from model_defs.layers import RMSNorm


class DraftAttention(nn.Module):
    """Attention of the head's layer, whose inputs are twice as wide as its output."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        model = head.model
        self.head_dim, self.repeats = model.head_dim, model.num_heads // model.num_kv_heads
        for name, rows in (("q", model.q_dim), ("k", model.kv_dim), ("v", model.kv_dim)):
            self.add_module(f"{name}_proj", nn.Linear(2 * head.width, rows, bias=False))
        self.o_proj = nn.Linear(model.q_dim, head.width, bias=False)

    def heads(self, x: Tensor, name: str) -> Tensor:
        """Return q, k or v ``[B, T, heads, head_dim]``, not rotated, k and v once for each head of q."""
        made = self.get_submodule(f"{name}_proj")(x).unflatten(-1, (-1, self.head_dim))
        return made if name == "q" else made.repeat_interleave(self.repeats, dim=2)


class DraftLayer(nn.Module):
    """The head's one layer."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.self_attn = DraftAttention(head)
        self.mlp = MLP(head.width, head.model.intermediate_size)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            self.add_module(name, RMSNorm(head.width, head.model.rms_norm_eps))


class DraftModule(nn.Module):
    """The head without an embedding of its own, over whole sequences.

    It is trained as it drafts (arXiv 2503.01840, section 3.2): in pass j the hidden state of a row is the head's own of
    the row before it in pass j - 1, and a row attends to entries of pass 0 up to j rows before it, and to its own chain
    behind those.
    """

    def __init__(self, hidden_size: int, head: DraftHead) -> None:
        super().__init__()
        self.fc = nn.Linear(NUM_STATES * hidden_size, head.width, bias=False)
        self.midlayer = DraftLayer(head)
        self.norm = RMSNorm(head.width, head.model.rms_norm_eps)
        self.lm_head = nn.Linear(head.width, head.draft_vocab, bias=False)

    def forward(
        self, states: Tensor, embedded: Tensor, rotation: Rotation, mask: Tensor, num_passes: int
    ) -> list[Tensor]:
        """Return what leaves the layer in each pass, ``[B, T, H]``; ``lm_head`` of its ``norm`` gives logits.

        Args:
            states: ``[B, T, 3 hidden_size]``, the target's streams.
            embedded: ``[B, T, H]`` of the tokens behind.
            mask: bool ``[B or 1, 1, T, T]``: what a row attends to in pass 0.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        hidden, embedded = self.fc(states), layer.input_layernorm(embedded)
        keys, values, outputs = list[Tensor](), list[Tensor](), list[Tensor]()
        for number in range(num_passes):
            x = torch.cat((embedded, layer.hidden_norm(hidden)), dim=-1)
            q, k = (rotation(attention.heads(x, name)) for name in "qk")
            keys.append(k)
            values.append(attention.heads(x, "v"))
            attended = _attend(q, keys, values, down(mask, number, dim=2))
            stream = hidden + attention.o_proj(attended.flatten(2).to(hidden.dtype))
            outputs.append(stream + layer.mlp(layer.post_attention_layernorm(stream)))
            hidden = down(outputs[-1], 1, dim=1)
        return outputs


def down(x: Tensor, count: int, dim: int) -> Tensor:
    """Return ``x`` with everything ``count`` places further along ``dim``, and zeros before it."""
    if count == 0:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - count)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, count)), kept), dim=dim)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Return ``[B, T, heads, d]``: over all entries of pass 0 that ``mask`` leaves, and of each later pass the one of a
    row's own chain."""
    scale, last = q.shape[-1] ** -0.5, len(keys) - 1
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys[0]).float() * scale
    scores = scores.masked_fill(~mask, -torch.inf if last == 0 else torch.finfo(torch.float32).min)
    chain = [(down(keys[i], last - i, dim=1), down(values[i], last - i, dim=1)) for i in range(1, last + 1)]
    own = [(q * k).sum(-1).float().transpose(1, 2)[..., None] * scale for k, _ in chain]
    weights = torch.cat((scores, *own), dim=-1).softmax(-1)
    count = scores.shape[-1]
    total = torch.einsum("bhqk,bkhd->bqhd", weights[..., :count].to(q.dtype), values[0].to(q.dtype))
    for index, (_, v) in enumerate(chain):
        total = total + weights[..., count + index].transpose(1, 2)[..., None].to(q.dtype) * v
    return total
