"""The definition of Mamba2Scan in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def reference(
    xbc: Tensor,
    steps: Tensor,
    decay_log: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    query_start: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    state_pool: Tensor,
    has_queries: bool = True,
) -> Tensor:
    """Returns what the selective state space of Mamba-2 (arXiv 2405.21060, sections 2.1 and 7.1) gives T packed tokens
    of S sequences, [T, H, P] in xbc's dtype; without queries the states alone change, and there are no rows.

    A head has a state [N, P] float32. A token whose step is dt = softplus(steps + step_bias) multiplies it by
    exp(-exp(decay_log) * dt), then adds the outer product of B and dt * x, and gets C'state + skip * x.

    xbc: [T, H P + 2 G N] bfloat16 or float32, rows may be strided: x of the H heads, B of the G groups, C of these,
    which is missing without queries; H / G neighbouring heads are a group. steps: [T, H] float32. decay_log, step_bias,
    skip: [H] float32. query_start: [S+1] int32, where each sequence's tokens begin. state_pool: [rows, H, N, P]
    float32, a row for each state. state_read: [S] int32, the row that a sequence goes on from, negative for zeros;
    state_write: [T] int32, the row that the state after a token is written to, in place, negative for none. All of a
    sequence's reads come before its writes; no row may be written twice, or read by one sequence and written by
    another. All is computed in float32, token by token: the bits of a result depend on the sequence's own tokens alone,
    whatever steps they come in. Numbers of a state below 2^-126 may count as zeros.
    Raises RuntimeError on a wrong shape or dtype and on a row outside the pool, before any write.
    """
    heads, state_dim, head_dim = state_pool.shape[1:]
    of_groups = (xbc.shape[1] - heads * head_dim) // (2 if has_queries else 1)
    x, b, *queries = xbc.float().split((heads * head_dim, *[of_groups] * (2 if has_queries else 1)), -1)
    c = queries[0] if has_queries else torch.zeros_like(b)
    x = x.unflatten(-1, (heads, head_dim))
    repeats = heads * state_dim // of_groups
    b, c = (each.unflatten(-1, (-1, state_dim)).repeat_interleave(repeats, dim=1) for each in (b, c))
    step = F.softplus(steps + step_bias)
    decay, added = torch.exp(-decay_log.exp() * step), step[:, :, None] * x
    out = torch.empty_like(x)
    states = [torch.zeros_like(state_pool[0]) if row < 0 else state_pool[row].clone() for row in state_read.tolist()]
    for sequence, (start, end) in enumerate(zip(query_start[:-1].tolist(), query_start[1:].tolist(), strict=True)):
        state = states[sequence]
        for t in range(start, end):
            state = state * decay[t, :, None, None] + b[t, :, :, None] * added[t, :, None]
            out[t] = torch.einsum("hnp,hn->hp", state, c[t]) + skip[:, None] * x[t]
            if state_write[t] >= 0:
                state_pool[state_write[t]] = state
    return out.to(xbc.dtype) if has_queries else xbc.new_empty((0, *out.shape[1:]))
