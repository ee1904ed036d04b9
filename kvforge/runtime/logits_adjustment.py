"""Changes to one sequence's logits before sampling: bias, penalties, bad words, guide, minimum length."""

import torch

from kvforge.runtime.sampling_state import SamplingState
from kvforge.runtime.sequence import Sequence
from kvforge.runtime.stop import ends_with


def adjust_logits(logits: torch.Tensor, sequence: Sequence, state: SamplingState) -> None:
    """Adjust ``logits`` [vocab_size] float32 of the sequence's next token in place; forbidden ones become -inf.

    The bias comes first, so penalties divide and multiply the biased logits, as in TensorRT-LLM. A forbidden
    word is never allowed: where only tokens that end the sequence are left, the minimum length (and with a guide
    ``ignore_eos``) gives way to them. Where a guide is complete, tokens that end the sequence are left whatever
    else forbids them.

    Raises:
        KvforgeError: the guide gave up.
    """
    params = state.params
    forbidden = own_ends = None
    if state.guide is not None:
        forbidden, may_end = state.guide.next_tokens()
        complete = may_end and bool(forbidden.all())
        own_ends = logits[state.stop_ids] if complete else None
    if len(state.bias):
        logits[state.bias_ids] += state.bias
    if state.counts is not None and state.in_prompt is not None:
        _penalize(logits, state, state.counts, state.in_prompt)
    if len(state.bad_tokens):
        logits[state.bad_tokens] = -torch.inf
    for word in state.bad_sequences:
        if len(word) - 1 <= sequence.num_generated and ends_with(sequence, word[:-1]):
            logits[word[-1]] = -torch.inf
    if forbidden is not None:
        ends = logits[state.stop_ids]
        logits.masked_fill_(forbidden, -torch.inf)
        if may_end:
            logits[state.stop_ids] = ends
    late = state.stop_ids if sequence.num_generated < params.min_tokens else state.late_stop_ids
    if len(late):
        ends = logits[late]
        logits[late] = -torch.inf
        if logits.max() == -torch.inf:
            logits[late] = ends
    if own_ends is not None and logits.max() == -torch.inf:
        logits[state.stop_ids] = own_ends


def _penalize(logits: torch.Tensor, state: SamplingState, counts: torch.Tensor, in_prompt: torch.Tensor) -> None:
    params, generated = state.params, counts > 0
    if params.repetition_penalty != 1:
        penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        torch.where(generated | in_prompt, penalized, logits, out=logits)
    logits.sub_(counts, alpha=params.frequency_penalty)
    logits.sub_(generated.float(), alpha=params.presence_penalty)
