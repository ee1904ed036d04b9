"""Changes to one sequence's logits before sampling: penalties, minimum length, bad words."""

import torch

from kvforge.runtime.sampling_state import SamplingState
from kvforge.runtime.sequence import Sequence
from kvforge.runtime.stop import ends_with


def adjust_logits(logits: torch.Tensor, sequence: Sequence, state: SamplingState) -> None:
    """Adjust ``logits`` [vocab_size] float32 of the sequence's next token in place; forbidden ones become -inf.

    A forbidden word is never allowed: where only tokens that end the sequence are left, the minimum length
    gives way to them.
    """
    params = state.params
    if state.counts is not None and state.in_prompt is not None:
        generated = state.counts > 0
        if params.repetition_penalty != 1:
            penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            torch.where(generated | state.in_prompt, penalized, logits, out=logits)
        logits.sub_(state.counts, alpha=params.frequency_penalty)
        logits.sub_(generated.float(), alpha=params.presence_penalty)
    if len(state.bad_tokens):
        logits[state.bad_tokens] = -torch.inf
    for word in state.bad_sequences:
        if len(word) - 1 <= sequence.num_generated and ends_with(sequence, word[:-1]):
            logits[word[-1]] = -torch.inf
    if sequence.num_generated < params.min_tokens:
        ends = logits[state.stop_ids]
        logits[state.stop_ids] = -torch.inf
        if logits.max() == -torch.inf:
            logits[state.stop_ids] = ends
