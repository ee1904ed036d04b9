"""The residual stream in a basis in which no channel stands out, as int8 activations need it.

A real model's stream has a few channels that are tens of times larger than the others, and a token's scale is made of
its largest number. Here every tensor that writes the stream is multiplied with an orthogonal matrix Q, and every one
that reads it with Q's inverse, behind the gain of the norm between them. An RMSNorm without a gain gives the same in
any basis, so the model's function stays (QuaRot, arXiv 2404.00456, section 4; its fused rotations). Q is a diagonal of
signs, Hadamard matrices over blocks of the largest power of two, and a Hartley matrix across the blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from model_defs import ModelConfig
from model_defs.draft_graph import STATES
from model_defs.draft_head import NUM_STATES
from model_defs.token_scores import SCORERS
from model_defs.weights import WeightSpec, weight_specs
from plugins.kv_rotation import block_size, rotate_blocks

SEED = 0
"""Of the signs."""
ROWS_AT_ONCE = 2048
"""Of a matrix: a table of embeddings is large, and its float32 copies several times so."""

Change = Callable[[Tensor], Tensor]

_READS = {
    "qkv": "input_norm",
    "q": "input_norm",
    "qkvz": "input_norm",
    "bcx": "input_norm",
    "zxbc": "input_norm",
    "steps": "input_norm",
    "qz": "input_norm",
    "zc": "input_norm",
    "ba": "input_norm",
    "gate_up": "post_norm",
    "experts.router": "post_norm",
    "experts.gate_up": "post_norm",
    "experts.shared_gate_up": "post_norm",
    "experts.shared_gate": "post_norm",
}
"""What of a layer reads the stream, and which of its norms is before it."""
_READS_ONCE = {
    "single_input.kv": "single_input.norm",
    "state_input.states": "single_input.norm",
    "state_input.gates": "single_input.norm",
    "lm_head": "norm",
    "lm_head_early_exit": "norm_early_exit",
}
"""The same of tensors that are in no layer; of a tied head as ``TIED``."""
_WRITES = ("o", "down", "experts.down", "experts.down_bias", "experts.shared_down")
TABLE, TIED = "embed", "norm"


def can_change(config: ModelConfig) -> bool:
    """Whether the stream is written by linear layers and the embedding alone, and read behind norms: not where a branch
    has a norm of its own at its end, or a layer an input of its own."""
    return not config.branch_norms and not config.per_layer_input


def rotate(x: Tensor, gain: Tensor | None = None) -> Tensor:
    """Return ``x`` ``[..., n]``, times ``gain`` ``[n]``, times Q, in float32."""
    if x.dim() == 2 and len(x) > ROWS_AT_ONCE:
        rotated = torch.empty(x.shape)
        for begin in range(0, len(x), ROWS_AT_ONCE):
            rotated[begin : begin + ROWS_AT_ONCE] = rotate(x[begin : begin + ROWS_AT_ONCE], gain)
        return rotated
    x = x.float() if gain is None else x.float() * gain.float()
    size = block_size(x.shape[-1])
    inner = 1 << (size.bit_length() - 1) // 2  # H of a product is the product of two H's
    count, outer = x.shape[-1] // size, size // inner
    rotated = _hadamard(outer) @ ((x * _signs(x.shape[-1])).unflatten(-1, (count, outer, inner)) @ _hadamard(inner))
    return rotated.flatten(-3) if count == 1 else (_hartley(count) @ rotated.flatten(-2)).flatten(-2)


@functools.cache
def _signs(n: int) -> Tensor:
    return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(SEED)) * 2.0 - 1


@functools.cache
def _hadamard(n: int) -> Tensor:
    """The normed Hadamard matrix of a power of two."""
    return rotate_blocks(torch.eye(n))


@functools.cache
def _hartley(n: int) -> Tensor:
    """The discrete Hartley transform of n numbers, symmetric and orthogonal: (cos + sin)(2 pi i j / n) / sqrt(n)."""
    angles = torch.outer(torch.arange(n), torch.arange(n)).remainder(n).double() * (2 * math.pi / n)
    return ((angles.cos() + angles.sin()) / math.sqrt(n)).float()


class Basis(Protocol):
    """What becomes of a checkpoint's tensors in an engine."""

    def change(self, name: str, is_head: bool = False) -> Change | None:
        """Return what makes the tensor ``name`` of what it was; None where it stays."""


class StatesBasis:
    """What becomes of the tensors of a draft head, which reads the stream at three places, without norms: where it is
    in the basis Q, or in another unit (``ModelConfig.residual_scale``)."""

    def __init__(self, is_changed: bool, unit: float) -> None:
        self._is_changed, self._unit = is_changed, unit

    def change(self, name: str, is_head: bool = False) -> Change | None:
        """See ``Basis``."""
        return self._of_states if name == STATES and (self._is_changed or self._unit != 1.0) else None

    def _of_states(self, weight: Tensor) -> Tensor:
        parts = [rotate(part) if self._is_changed else part.float() for part in weight.chunk(NUM_STATES, dim=1)]
        return torch.cat(parts, dim=1) * self._unit


class StreamBasis:
    """What becomes of the tensors of a model whose stream is in the basis Q.

    Args:
        read: gives a norm's gain as the engine has it.
    """

    def __init__(self, config: ModelConfig, read: Callable[[WeightSpec], Tensor]) -> None:
        self._specs, self._cut = {spec.name: spec for spec in weight_specs(config)}, config.cut
        self._has_units = bool(config.kv_scorer)
        self._read = read

    def change(self, name: str, is_head: bool = False) -> Change | None:
        """Return what makes the tensor ``name`` of what it was, ``[N, K]`` or ``[N]``; None where it stays. ``is_head``
        is the embedding's tensor as a tied head."""
        module, _, kind = name.rpartition(".")
        layer, part = self._split(module if kind in ("weight", "bias") else name)
        if part in _WRITES:
            return self._write
        if part == TABLE:
            return self._reader(TIED) if is_head else rotate
        if kind != "weight":
            return None
        if part in _READS:
            return self._reader(f"{layer}{_READS[part]}")
        if part in _READS_ONCE:
            return self._reader(_READS_ONCE[part])
        if part.startswith(f"{SCORERS}."):
            _, owner, linear = part.split(".")
            norm = f"layers.{owner}.input_norm" if int(owner) < self._cut else _READS_ONCE["single_input.kv"]
            return self._reader(norm) if linear == ("first" if self._has_units else "last") else None
        is_gain = part in ("input_norm", "post_norm") or part in _READS_ONCE.values()
        return torch.ones_like if is_gain else None

    @staticmethod
    def _split(module: str) -> tuple[str, str]:
        """The layer's prefix and a module's name in it."""
        if not module.startswith("layers."):
            return "", module
        _, number, part = module.split(".", 2)
        return f"layers.{number}.", part

    def _reader(self, norm: str) -> Change:
        gain = self._read(self._specs[f"{norm}.weight"])
        return lambda weight: rotate(weight, gain)

    @staticmethod
    def _write(tensor: Tensor) -> Tensor:
        return rotate(tensor) if tensor.dim() == 1 else rotate(tensor.T).T.contiguous()
