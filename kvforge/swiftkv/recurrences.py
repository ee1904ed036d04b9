"""What layers that keep a state compute of whole sequences: their convolution, the scan of Mamba-2 (arXiv 2405.21060,
section 6.1, all in one chunk), and the gated delta rule (arXiv 2412.06464, equation 10), token by token.

``positions`` int64 ``[B or 1, T]`` are those of tokens in their samples: nothing is taken across a sample's ends.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def convolved(channels: Tensor, gains: Tensor, positions: Tensor, own: Tensor | None = None) -> Tensor:
    """Return the causal convolution of ``[B, T, C]``, channel by channel, with gains ``[C, 1, width]``; of each token
    itself ``own`` ``[B, T, C]`` takes the place."""
    total = (channels if own is None else own) * gains[:, 0, -1]
    for back in range(1, gains.shape[2]):
        earlier = F.pad(channels, (0, 0, back, 0))[:, : channels.shape[1]]
        total = total + earlier.masked_fill((positions < back)[..., None], 0) * gains[:, 0, -1 - back]
    return total


def scanned(values: Tensor, steps: Tensor, decay_log: Tensor, b: Tensor, c: Tensor, positions: Tensor) -> Tensor:
    """Return C'S of each token ``[B, T, heads, d]``, S the state after it, in memory of T squared: of ``values`` ``[B,
    T, heads, d]``, ``steps`` and logarithms of decays ``[B, T, heads]``, ``b`` and ``c`` ``[B, T, heads, n]``."""
    index, total = torch.arange(values.shape[1], device=values.device), decay_log.cumsum(1).transpose(1, 2)
    first = index - positions  # of the sample each token is in
    seen = (index[:, None] >= index) & (index >= first[..., None])
    kept = (total[..., None] - total[..., None, :]).masked_fill(~seen[:, None], -torch.inf).exp()
    with torch.autocast(values.device.type, enabled=False):
        taken = torch.einsum("bthn,bshn->bhts", c, b) * kept
        return torch.einsum("bhts,bshd->bthd", taken, steps[..., None] * values)


def unit(heads: Tensor) -> Tensor:
    """Return queries or keys of the delta rule ``[…, d]`` over their lengths."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)


def delta_ruled(q: Tensor, k: Tensor, v: Tensor, rates: Tensor, decays: Tensor, positions: Tensor) -> Tensor:
    """Return S'q of each token ``[B, T, heads, dv]``, S the state after it: of normed q and k ``[B, T, heads, dk]``, v
    ``[B, T, heads, dv]``, rates ``[B, T, heads]``, and decays ``[B, T, heads, 1 or dk]``."""
    decays = decays.masked_fill((positions == 0)[..., None, None], 0)[..., None]
    state, results = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []
    for t in range(q.shape[1]):
        state = decays[:, t] * state
        missing = v[:, t] - (state * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * (rates[:, t, :, None] * missing)[:, :, None]
        results.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(results, 1)
