"""How much work a planned step is, in the units that the cost model has a price for."""

from dataclasses import dataclass, fields

from kvforge.runtime.scheduling.schedule import Schedule


@dataclass(frozen=True)
class StepWork:
    """One step. Keys are counted once per layer that attends them."""

    steps: int
    """1: what every step costs, reading the weights to the cut among it."""
    upper_calls: int
    """1 if anything survives the cut: reading the weights past it and the head's."""
    tokens: int
    """Tokens that run to the cut."""
    survivors: int
    """Tokens that run past the cut and through the head, and are sampled."""
    query_keys: int
    """Query-key pairs over all layers."""
    keys_read: int
    """Tokens of cache read over all layers: a sequence's keys once a layer, whatever its number of queries."""


WORK_NAMES = tuple(field.name for field in fields(StepWork))


def step_work(plan: Schedule, num_layers: int, cut: int) -> StepWork:
    """Return the work of ``plan``, not yet committed, without drafts, on a model without sliding windows.

    All tokens of a chunk run the ``cut`` lower layers; of a chunk that reaches its sequence's end, the last token
    alone runs the others.
    """
    decodes = plan.decodes
    tokens = survivors = len(decodes)
    lower_pairs = lower_keys = upper_keys = sum([sequence.length for sequence in decodes])
    for sequence, count in plan.prefills:
        end = sequence.num_computed + count
        tokens += count
        lower_pairs += count * sequence.num_computed + count * (count + 1) // 2
        lower_keys += end
        if end == sequence.length:
            survivors += 1
            upper_keys += end
    upper = num_layers - cut
    return StepWork(
        steps=1, upper_calls=int(survivors > 0), tokens=tokens, survivors=survivors,
        query_keys=cut * lower_pairs + upper * upper_keys, keys_read=cut * lower_keys + upper * upper_keys,
    )  # fmt: skip
