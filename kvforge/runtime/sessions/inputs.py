"""What the graphs take of a step, in their order.

T packed tokens of S sequences, R of them survivors, M pages a sequence; int32 on the CPU, but for ``hidden``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvforge.kv_policies import KVPolicy
from kvforge.runtime.sessions.policy_inputs import PolicyInputs, neutral_inputs


class LowerStep(NamedTuple):
    """A step's tokens; all are computed up to the cut."""

    input_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slot_mapping: Tensor
    """[T] page * page_size + offset"""
    query_start: Tensor
    """[S+1]"""
    kv_length: Tensor
    """[S] tokens in each sequence's pages after this step"""
    page_table: Tensor
    """[S, M]"""
    state: PolicyInputs = ()
    """The KV policy's, behind the pools."""
    rows: tuple[Tensor, ...] = ()
    """Behind these ``state_read`` [S] and ``state_write`` [T], where layers keep a state: the rows of states
    that the sequences go on from, and that the states behind the tokens go to; -1 for none."""
    chosen: tuple[Tensor, Tensor] | None = None
    """Only for sessions that run ahead: token ids of the step before, int32 on the device, and [D] which of them each
    of the first D ``input_ids`` is, -1 where it is what stands there."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the graph takes before the pools."""
        return self[:6]


class UpperStep(NamedTuple):
    """The rows that go past the cut: of each sequence its last tokens, in order."""

    hidden: Tensor
    """[T, hidden_size] ``lower``'s, on the session's device"""
    survivor_index: Tensor
    """[R] rows of ``hidden``"""
    survivor_start: Tensor
    """[S+1]"""
    positions: Tensor
    """[T]"""
    kv_length: Tensor
    """[S] as ``LowerStep``'s; above a blind cut, tokens in each sequence's pages there"""
    page_table: Tensor
    """[S, M]"""
    state: PolicyInputs = ()
    """As ``LowerStep``'s."""
    survivor_slots: Tensor | None = None
    """[R] page * page_size + offset where K and V of survivors go, above a blind cut; None with any other"""
    logit_index: Tensor | None = None
    """[L] survivors whose logits are asked for there, at least one; None: all"""
    survivor_state: Tensor | None = None
    """[R] rows of the states after the survivors, where layers above a cut keep a state; None elsewhere"""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the graph takes before the pools."""
        return self[:6]


class PredictStep(NamedTuple):
    """Tokens of prompts whose cache is predicted, and the rows whose queries are wanted."""

    tokens: LowerStep
    """All fields as there."""
    query_index: Tensor
    """[Q] rows of the packed tokens, Q >= 1"""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the graph takes before the pools."""
        return *self.tokens.inputs, self.query_index


class VerifyStep(NamedTuple):
    """D drafts of S sequences, and the logits of each sequence's last token and its drafts; all on the CPU."""

    logits: Tensor
    """[S + D, vocab_size] float32, ``upper``'s"""
    draft_ids: Tensor
    """[D]"""
    draft_start: Tensor
    """[S+1] where each sequence's drafts begin"""
    draft_probs: Tensor
    """[D, vocab_size] float32 that each draft was drawn from; [0, vocab_size] where none was"""
    temperature: Tensor
    """[S] float32; 0 is greedy"""
    uniform: Tensor
    """[S + D, 2] float32 random numbers in [0, 1)"""


class DraftStep(NamedTuple):
    """T rows for a draft head: the hidden state of a token, and the token behind it. Of R of them, the last ones of
    each sequence, the next token is wanted."""

    input_ids: Tensor
    """[T]"""
    hidden: Tensor
    """[T, H] on the session's device"""
    positions: Tensor
    """[T] of the tokens whose hidden states these are"""
    slot_mapping: Tensor
    """[T]"""
    survivor_index: Tensor
    """[R], R >= 1"""
    survivor_start: Tensor
    """[S+1]"""
    kv_length: Tensor
    """[S] rows in each sequence's pages after this pass"""
    page_table: Tensor
    """[S, M]"""


def known_ids(step: LowerStep, input_ids: Tensor, rows: Tensor) -> None:
    """Fill in those of a step's ``input_ids`` that the step before has chosen; ``rows`` are those of ``chosen``, all on
    one device. Of a sequence that has no token, whose row is dropped, any id is taken."""
    assert step.chosen is not None
    own = input_ids[: len(rows)]
    ids = step.chosen[0].index_select(0, rows.clamp(min=0)).clamp_(min=0)
    own.copy_(torch.where(rows < 0, own, ids))


def policy_inputs(step: LowerStep | UpperStep, policy: KVPolicy) -> PolicyInputs:
    """Return what a graph takes of the KV policy behind the pools."""
    return step.state or neutral_inputs(policy, step.kv_length.shape[0])


def past_cut_inputs(step: UpperStep) -> tuple[Tensor, ...]:
    """Return what ``upper`` takes behind those above a blind cut, or above one over which layers keep a state."""
    if step.survivor_state is not None:
        return (step.survivor_state,)
    if step.survivor_slots is None or step.logit_index is None:
        return ()
    return step.survivor_slots, step.logit_index
