"""Where the tokens of a batch are: their rotation, and what each of them attends to."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model_defs import ModelConfig
from model_defs.rope import apply_rope, inverse_frequencies, query_growth, rope_cos_sin
from model_defs.rope_config import RopeConfig
from model_defs.rotary_rows import amplitudes, head_order

BLIND = -1
"""The key of the mask of layers above a blind cut, among those of windows."""


@dataclass(frozen=True)
class Rotation:
    """``cos`` and ``sin`` ``[B or 1, T, head_dim / 2]`` fp32, with RoPE's amplitude. ``head_order`` is where the model
    has each element of a head whose halves rotate, None where they are in that order."""

    cos: Tensor
    sin: Tensor
    head_order: Tensor | None = None

    def __call__(self, heads: Tensor) -> Tensor:
        """Return q or k ``[B, T, heads, head_dim]`` rotated, their elements in the order of ``head_order``."""
        return apply_rope(heads if self.head_order is None else heads[..., self.head_order], self.cos, self.sin)


@dataclass(frozen=True)
class Layout:
    """``rotations`` by a model's ``rope_of`` and ``rope_of_own`` a layer; ``masks`` by attention window: bool
    ``[B or 1, 1, T, T]`` (true: attends), or None where plain causal attention says the same; ``positions`` int64 ``[B
    or 1, T]`` are those of tokens in their samples; ``growth`` ``[B or 1, T, 1]`` is what queries are multiplied by,
    where the model says so."""

    rotations: Mapping[RopeConfig, Rotation]
    masks: Mapping[int, Tensor | None]
    positions: Tensor
    growth: Tensor | None = None

    def rotate(self, heads: Tensor, rope: RopeConfig) -> Tensor:
        """Return q or k ``[B, T, heads, head_dim]`` rotated by ``rope``; see ``Rotation``."""
        return self.rotations[rope](heads)


def make_layout(
    config: ModelConfig,
    length: int,
    segments: Tensor | None = None,
    device: torch.device | str = "cpu",
    answers: Tensor | None = None,
) -> Layout:
    """Return the layout of sequences of ``length`` tokens.

    ``segments`` int64 ``[B, T]`` packs several samples into a sequence: each run of equal numbers is one sample, with
    positions from 0 and no attention across its ends. Without it, every sequence is one sample. ``answers`` bool ``[B,
    T]`` are the tokens that an answer's are predicted at, for layers above a blind cut: its mask is ``BLIND``'s.
    """
    index = torch.arange(length, device=device)
    if segments is None:
        positions, same, longest = index[None], None, length
    else:
        segments = segments.to(device)
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        start = torch.where(begins, index, 0).cummax(dim=1).values  # of the sample each token is in
        positions, same = index - start, start[:, :, None] == start[:, None, :]
        longest = int(positions.max()) + 1
    rotations = _rotations(config, longest, positions)
    masks = {window: _mask(index, same, window, length) for window in set(config.layer_windows)}
    if answers is not None:
        masks[BLIND] = _blind_mask(positions, same, answers.to(device), config.num_anchors)
    return Layout(rotations, masks, positions, query_growth(config.query_growth, positions))


def make_chunk_layout(config: ModelConfig, start: int, end: int, device: torch.device | str = "cpu") -> Layout:
    """Return the layout of the tokens at ``start`` to ``end`` of one sequence, which attend to K and V of all ``end``
    tokens."""
    positions, keys = torch.arange(start, end, device=device)[None], torch.arange(end, device=device)
    distance = positions[0, :, None] - keys
    rotations = _rotations(config, end, positions)
    masks: dict[int, Tensor | None] = {
        window: ((distance >= 0) & ((distance < window) if window else True))[None, None]
        for window in set(config.layer_windows)
    }
    return Layout(rotations, masks, positions, query_growth(config.query_growth, positions))


def _rotations(config: ModelConfig, length: int, positions: Tensor) -> dict[RopeConfig, Rotation]:
    own = ((config.rope_of_own(layer), config.rotated_dim_of(layer)) for layer in range(config.num_layers))
    every = dict.fromkeys((*config.rotations, *own))
    return {rope: _rotation(rope.for_length(length), dim, positions) for rope, dim in every}


def _rotation(rope: RopeConfig, head_dim: int, positions: Tensor) -> Rotation:
    device = positions.device
    amplitude, order = amplitudes(rope, head_dim).to(device), head_order(rope, head_dim)
    cos, sin = (amplitude * x for x in rope_cos_sin(positions, inverse_frequencies(rope, head_dim).to(device)))
    return Rotation(cos, sin, None if order is None else order.to(device))


def _blind_mask(positions: Tensor, same: Tensor | None, answers: Tensor, num_anchors: int) -> Tensor:
    """Return what may be attended to above a blind cut, bool ``[B, 1, T, T]``: a sample's anchors and what is of the
    answer that a token is in. Tokens of no answer attend to anchors and themselves, and nobody looks at them."""
    begins = answers.clone()
    begins[:, 1:] &= ~answers[:, :-1] | (positions[:, 1:] == 0)
    answer = torch.where(answers, begins.long().cumsum(1), 0)
    in_one = (answer[:, :, None] == answer[:, None, :]) & answers[:, None, :]
    index = torch.arange(answers.shape[1], device=answers.device)
    own = index[:, None] == index
    seen = (in_one | (positions < num_anchors)[:, None, :] | own) & (index[:, None] >= index)
    return (seen if same is None else seen & same)[:, None]


def _mask(index: Tensor, same: Tensor | None, window: int, length: int) -> Tensor | None:
    """Return what may be attended to: nothing later, nothing ``window`` or more tokens back, one's own sample."""
    limited = 0 < window < length
    if same is None and not limited:
        return None
    distance = index[:, None] - index
    mask = distance >= 0
    if limited:
        mask &= distance < window
    return (mask[None] if same is None else mask & same)[:, None]
