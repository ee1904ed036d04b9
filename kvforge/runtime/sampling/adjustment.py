"""Changes to one sequence's logits before sampling: bias, penalties, bad words, guide, minimum length."""

import torch

from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.sampling.state import SamplingState


def adjust_logits(logits: torch.Tensor, sequence: Sequence, state: SamplingState) -> None:
    """Adjust ``logits`` [vocab_size] float32 of the sequence's next token in place; forbidden ones become -inf.

    The bias comes first, so penalties divide and multiply the biased logits, as in TensorRT-LLM. A forbidden
    word is never allowed: where only tokens that end the sequence are left, the minimum length (and with a guide
    ``ignore_eos``) gives way to them. Where a guide is complete, tokens that end the sequence are left whatever
    else forbids them.

    Raises:
        KvforgeError: the guide gave up.
    """
    request = state.request
    forbidden = own_ends = None
    if state.guide is not None:
        forbidden, may_end = state.guide.next_tokens()
        complete = may_end and bool(forbidden.all())
        own_ends = logits[request.stop_ids] if complete else None
    if len(request.bias):
        logits[request.bias_ids] += request.bias
    if state.counts is not None and request.in_prompt is not None:
        _penalize(logits, state, state.counts, request.in_prompt)
    if request.bad_words is not None:
        logits[request.bad_words.single] = -torch.inf
        for tokens in request.bad_words.completed_by(state.bad_node):
            logits[tokens] = -torch.inf
    if forbidden is not None:
        ends = logits[request.stop_ids]
        logits.masked_fill_(forbidden, -torch.inf)
        if may_end:
            logits[request.stop_ids] = ends
    late = request.stop_ids if sequence.num_generated < state.params.min_tokens else request.late_stop_ids
    if len(late):
        ends = logits[late]
        logits[late] = -torch.inf
        if logits.max() == -torch.inf:
            logits[late] = ends
    if own_ends is not None and logits.max() == -torch.inf:
        logits[request.stop_ids] = own_ends


def _penalize(logits: torch.Tensor, state: SamplingState, counts: torch.Tensor, in_prompt: torch.Tensor) -> None:
    params, generated = state.params, counts > 0
    if params.repetition_penalty != 1:
        penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        torch.where(generated | in_prompt, penalized, logits, out=logits)
    logits.sub_(counts, alpha=params.frequency_penalty)
    logits.sub_(generated.float(), alpha=params.presence_penalty)
