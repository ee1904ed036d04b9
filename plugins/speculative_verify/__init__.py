"""SpeculativeVerify: which drafts the target model accepts, and the token that follows them."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.operator import Operator
from plugins.registration import define
from plugins.speculative_verify.reference import reference

SCHEMA = (
    "(Tensor logits, Tensor draft_ids, Tensor draft_start, Tensor draft_probs, Tensor temperature, Tensor uniform) "
    "-> (Tensor, Tensor)"
)

OPERATOR = Operator(
    name="speculative_verify",
    schema=SCHEMA,
    reference=reference,
    version=1,
    faces=("reference", "cpu", "triton", "onnx", "tensorrt"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(logits, draft_ids, draft_start, draft_probs, temperature, uniform) -> tuple[Tensor, Tensor]:
    shape = temperature.shape
    return temperature.new_empty(shape, dtype=torch.int32), temperature.new_empty(shape, dtype=torch.int32)


define(OPERATOR.name, SCHEMA, _fake)


def speculative_verify(
    logits: Tensor, draft_ids: Tensor, draft_start: Tensor, draft_probs: Tensor, temperature: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Verifies D packed drafts of S sequences; returns (accepted, next_token), each [S] int32.

    draft_start: [S+1] int32 from 0 to D; sequence s has gamma = draft_start[s+1] - draft_start[s] drafts (0
    allowed). logits: [D+S, vocab] float32, gamma+1 rows per sequence from row draft_start[s]+s on, the last
    after all its drafts. draft_ids: [D] int32. draft_probs: [D, vocab] float32, what each draft was drawn from,
    or [0, vocab] when drafts were not drawn (their distribution is one-hot). temperature: [S] float32, 0 = greedy.
    uniform: [D+S, 2] float32 in [0, 1): column 0 decides acceptance, column 1 draws the next token.

    Greedy: drafts are accepted while they equal the argmax (the lowest index of equals), and the next token is
    the argmax after them. Sampling (Leviathan et al., arXiv 2211.17192, Algorithm 1): with p =
    softmax(logits / temperature), draft d of distribution q is accepted while uniform * q(d) < p(d); the next
    token is drawn from max(p - q, 0) normalised at the first rejection (from p if that is zero), else from the
    last row's p. `accepted` counts accepted drafts, so accepted + 1 tokens come of the step.
    Raises RuntimeError on a wrong shape or dtype, and on a draft outside the vocabulary.
    """
    return torch.ops.kvforge.speculative_verify(logits, draft_ids, draft_start, draft_probs, temperature, uniform)
