"""Prompts that are predicted: what an auxiliary model gives of them, and what the model computes: numbers, never
tensors."""

from kvforge.common.exact_intervals import ExactTokens
from kvforge.runtime.requests.sequence import PredictedPrompt, Sequence
from kvforge.runtime.scheduling.holdings import Holdings
from kvforge.runtime.scheduling.schedule import Schedule


class Predictions:
    """An auxiliary model runs over all of a prompt in chunks, and then the model itself over the ``intervals`` from
    left to right, over what is predicted around them."""

    def __init__(self, holdings: Holdings, exact_tokens: ExactTokens) -> None:
        self._holdings, self._exact_tokens = holdings, exact_tokens

    def add(self, sequence: Sequence) -> None:
        """Note how much of a new sequence is to be predicted."""
        if num_tokens := self._exact_tokens.num_to_predict(sequence.num_prompt_tokens):
            sequence.predicted = PredictedPrompt(num_tokens)

    def plan_chunk(self, plan: Schedule, sequence: Sequence) -> None:
        """Plan as much as fits of a prompt that is not predicted to its end."""
        predicted, holdings = sequence.predicted, self._holdings
        assert predicted is not None
        count = min(predicted.num_tokens - predicted.num_done, plan.budget)
        end = predicted.num_done + count
        if len(sequence.pages) * holdings.config.page_size >= end or holdings.grow(plan, sequence, end):
            plan.budget -= count
            plan.predictions.append((sequence, count))

    def commit(self, plan: Schedule) -> None:
        """Record that a step has predicted its part of prompts; go on with what the model computes of those that are
        complete."""
        for sequence, num_tokens in plan.predictions:
            predicted = sequence.predicted
            assert predicted is not None
            predicted.num_done += num_tokens
            if predicted.num_done == predicted.num_tokens:
                importance = plan.importance.get(sequence, ())
                predicted.intervals = self._exact_tokens.intervals(sequence.num_prompt_tokens, importance)
                sequence.num_computed = predicted.intervals[0][0]
                self._holdings.slots.num_computed[sequence.slot] = sequence.num_computed

    def give_back(self, sequence: Sequence) -> None:
        """Forget what was predicted of a sequence."""
        if sequence.predicted is not None:
            sequence.predicted = PredictedPrompt(sequence.predicted.num_tokens)
