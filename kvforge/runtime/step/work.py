"""What a step is about to do, in numbers, for whoever watches how long it takes."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from kvforge.manifest import Manifest
from kvforge.runtime.scheduling.schedule import Schedule

Kind = Literal["prefill", "decode", "transition", "sample", "draft"]


class Work(NamedTuple):
    """A piece of work; pieces of one ``kind`` take time in proportion to ``units``, or less where most is fixed cost.

    ``variant`` says what the session may have to prepare once, such as a CUDA graph to capture: the first piece of a
    variant may take much longer than its units say. It is empty where nothing is.
    """

    kind: Kind
    units: float
    variant: tuple[int, ...] = ()


WorkListener = Callable[[Work], None]
"""Told of each piece on the engine's thread, right before it."""


def token_units(plan: Schedule, manifest: Manifest) -> float:
    """Return the floating-point operations of a plan's tokens, as a number of tokens without attention."""
    num_pairs = sum(sequence.length for sequence in plan.decodes)
    num_pairs += sum(count * (sequence.num_computed + count) for sequence, count in plan.prefills)
    num_pairs += sum(count * (sequence.num_predicted + count) for sequence, count in plan.predictions)
    return units_of(plan.num_tokens, num_pairs, manifest)


def units_of(num_tokens: int, num_pairs: int, manifest: Manifest) -> float:
    """Return the same of so many tokens, and pairs of a token and one that it attends to."""
    of_pair = 2 * manifest.model.num_layers * manifest.model.num_heads * manifest.model.head_dim
    return num_tokens + num_pairs * of_pair / max(manifest.num_parameters, 1)


def variant_of(plan: Schedule) -> tuple[int, ...]:
    """Return how many sequences a plan has and how long the longest is, each as a power of two."""
    lengths = [sequence.length for sequence in plan.sequences]
    return len(lengths).bit_length(), max(lengths).bit_length()
