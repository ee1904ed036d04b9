"""The definition of GatedDeltaRule in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

NORM_EPS = 1e-6
"""Of the norms of queries and keys."""


def reference(
    qkv: Tensor,
    gates: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    query_start: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    state_pool: Tensor,
    has_queries: bool = True,
) -> Tensor:
    """Returns what linear attention with a gated delta rule (Gated DeltaNet, arXiv 2412.06464, equation 10) gives T
    packed tokens of S sequences, [T, Hv, dv] in qkv's dtype; without queries the states alone change, and there are no
    rows.

    A value head has a matrix S [dk, dv] float32. A token multiplies it by exp(-exp(decay_log) * softplus(a +
    decay_bias)), one number for the head or one for each of its dk rows (Kimi Delta Attention, arXiv 2510.26692,
    equation 1), then adds the outer product of k and sigmoid(b) * (v - S'k), and gets S'q. q and k are x / sqrt(sum
    x^2 + 1e-6) of the token's, q then over sqrt(dk): that is here, because the kernel has them in float32.

    qkv: [T, 2 Hk dk + Hv dv] bfloat16 or float32, rows may be strided: q of the Hk key heads, which is missing without
    queries, k of these, v of the Hv value heads, of which Hv / Hk neighbours have one key head. gates: [T, Hv + Hv
    n] float32, b of the value heads, then a of these, n = 1 or dk numbers each. decay_log: [Hv], decay_bias: [Hv n]
    float32. query_start: [S+1] int32, where each sequence's tokens begin. state_pool: [rows, Hv, dk, dv] float32, a row
    for each state. state_read: [S] int32, the row that a sequence goes on from, negative for zeros; state_write: [T]
    int32, the row that the state after a token is written to, in place, negative for none. All of a sequence's reads
    come before its writes; no row may be written twice, or read by one sequence and written by another. All is computed
    in float32, token by token: the bits of a result depend on the sequence's own tokens alone, whatever steps they come
    in.
    Raises RuntimeError on a wrong shape or dtype and on a row outside the pool, before any write.
    """
    value_heads, key_dim, value_dim = state_pool.shape[1:]
    values = value_heads * value_dim
    q_and_k, v = qkv.float().split((qkv.shape[1] - values, values), -1)
    q, k = q_and_k.chunk(2, -1) if has_queries else (torch.zeros_like(q_and_k), q_and_k)
    key_heads = k.shape[1] // key_dim
    q, k = (x.unflatten(-1, (key_heads, key_dim)).repeat_interleave(value_heads // key_heads, dim=1) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q, v = q * key_dim**-0.5, v.unflatten(-1, (value_heads, value_dim))
    rate = torch.sigmoid(gates[:, :value_heads])
    steps = F.softplus(gates[:, value_heads:] + decay_bias).unflatten(-1, (value_heads, -1))
    decay = torch.exp(-decay_log.exp()[:, None] * steps)
    out = v.new_empty(v.shape)
    states = [torch.zeros_like(state_pool[0]) if row < 0 else state_pool[row].clone() for row in state_read.tolist()]
    for sequence, (start, end) in enumerate(zip(query_start[:-1].tolist(), query_start[1:].tolist(), strict=True)):
        state = states[sequence]
        for t in range(start, end):
            state = state * decay[t, :, :, None]
            known = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], rate[t, :, None] * (v[t] - known))
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
            if state_write[t] >= 0:
                state_pool[state_write[t]] = state
    return out.to(qkv.dtype) if has_queries else qkv.new_empty((0, *out.shape[1:]))
