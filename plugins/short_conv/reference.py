"""The definition of ShortConv in plain torch."""

import torch
from torch import Tensor


def reference(
    x: Tensor,
    weight: Tensor,
    query_start: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    conv_pool: Tensor,
    activates: bool = True,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns sums over j of weight[j] * input j [T, C] in x's dtype for T packed tokens of S sequences, where the W
    inputs of a token are the rows of x of the last W tokens of its sequence, oldest first, its own last, plus ``bias``
    where there is one; SiLU of these sums where it ``activates``.

    x: [T, C] bfloat16 or float32, rows may be strided; weight: [W, C] in x's dtype, W >= 2; bias: [C] in x's dtype.
    query_start: [S+1] int32, where each sequence's tokens begin. conv_pool: [rows, W-1, C] in x's dtype, a row for each
    state: the inputs of the W-1 tokens before the next. state_read: [S] int32, the row that a sequence goes on from,
    negative for zeros; state_write: [T] int32, the row that the state after a token is written to, in place, negative
    for none. All of a sequence's reads come before its writes; no row may be written twice, or read by one sequence and
    written by another. Sums are in float32, the bias first, then the oldest input; all bits of a row depend on the
    sequence's own inputs alone, whatever step they come in.
    Raises RuntimeError on a wrong shape or dtype and on a row outside the pool, before any write.
    """
    first = torch.zeros(x.shape[1]) if bias is None else bias.float()
    width, out = len(weight), torch.empty_like(x, memory_format=torch.contiguous_format)
    before = [torch.zeros_like(conv_pool[0]) if row < 0 else conv_pool[row].clone() for row in state_read.tolist()]
    for sequence, (start, end) in enumerate(zip(query_start[:-1].tolist(), query_start[1:].tolist(), strict=True)):
        inputs = torch.cat((before[sequence], x[start:end]))
        for token in range(start, end):
            window = inputs[token - start : token - start + width].float()
            total = first
            for row, gains in zip(window, weight.float(), strict=True):
                total = total + row * gains
            out[token] = (total * torch.sigmoid(total) if activates else total).to(x.dtype)
            if state_write[token] >= 0:
                conv_pool[state_write[token]] = inputs[token - start + 1 : token - start + width]
    return out
