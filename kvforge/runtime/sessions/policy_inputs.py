"""What graphs take of a step for an engine's KV policy, besides what every engine's do."""

from torch import Tensor

from kvforge.kv_policies import KVPolicy

PolicyInputs = tuple[Tensor, ...]
"""A tensor for each of ``Keeping.state_inputs``: int32 ``[S]``, or ``[S, Ms]`` for a table. Or ``()``: all neutral."""


def neutral_inputs(policy: KVPolicy, num_seqs: int, num_columns: int = 1) -> PolicyInputs:
    """Return the inputs of sequences of which none has anything of the policy's."""
    return tuple(one.neutral_rows(num_seqs, num_columns) for one in policy.keeping.state_inputs)


def input_shapes(policy: KVPolicy, num_seqs: int, num_columns: int) -> list[tuple[int, ...]]:
    """Return the shapes of the policy's inputs."""
    return [one.shape(num_seqs, num_columns) for one in policy.keeping.state_inputs]
