"""Optimisation profiles: which sizes the inputs of each graph may have, from the engine's limits.

Two profiles, because kernels that are best for thousands of prompt tokens are not best for one token per sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvforge.compiler.options import ResolvedOptions
from kvforge.tensorrt.graph_tensors import INPUTS, policy_inputs, rows_of

PROFILES = ("decode", "mixed")
"""Their names, in the order they have in a plan: steps of generated tokens alone, and steps with prompts."""

MAX_ELEMENTS = 2**31 - 1
"""The most elements one tensor of TensorRT can have."""

OPTIMAL_PAGES = 256
"""Pages of the pools that the builder allocates; no kernel's choice depends on them."""


@dataclass(frozen=True)
class Range:
    """Least, best-served and largest size of a dimension."""

    minimum: int
    optimum: int
    maximum: int


def size_ranges(options: ResolvedOptions, profile: str) -> dict[str, Range]:
    """Return the range of each dynamic dimension in a profile; ``pages`` is not among them.

    Sequences S, starts S+1, tokens T, survivors R, page-table columns M, those of a KV policy's tables Ms, and in
    ``verify`` drafts D, proposals (D, or 0 where drafts were not drawn) and rows D+S.
    """
    sequences = min(options.max_num_seqs, options.max_num_tokens)
    survivors = min(options.max_num_tokens, sequences * (1 + options.max_draft_len))
    tokens = {"decode": survivors, "mixed": options.max_num_tokens}[profile]
    columns = -(-options.max_seq_len // options.page_size)
    drafts = sequences * options.max_draft_len
    return {
        "sequences": Range(1, sequences, sequences),
        "starts": Range(2, sequences + 1, sequences + 1),
        "tokens": Range(1, tokens, tokens),
        "survivors": Range(1, sequences, survivors),
        "columns": Range(1, columns, columns),
        "state_columns": Range(1, columns, columns),
        "slots": Range(1, options.max_num_seqs, options.max_num_seqs),
        "drafts": Range(0, drafts, drafts),
        "proposals": Range(0, drafts, drafts),
        "rows": Range(1, drafts + sequences, drafts + sequences),
    }


def max_pages(options: ResolvedOptions, fixed: Sequence[int]) -> int:
    """Return how many pages a pool ``[pages, *fixed]`` can have: what ``max_num_seqs`` full sequences need, and no more
    than one tensor can hold."""
    elements = 1
    for size in fixed:
        elements *= size
    columns = -(-options.max_seq_len // options.page_size)
    return max(1, min(options.max_num_seqs * columns, MAX_ELEMENTS // elements))


def input_ranges(
    graph: str, name: str, shape: Sequence[int], options: ResolvedOptions, profile: str
) -> tuple[Range, ...]:
    """Return the range of every dimension of an input of a graph.

    ``shape`` is the network's, -1 where dynamic. An input that is none of the step's is a pool: its first dimension
    counts pages, or sequences of a KV policy. Raises ValueError when the dynamic dimensions are not the ones that the
    graph should have.
    """
    known = INPUTS[graph] | policy_inputs(graph, options.policy)
    symbols = known.get(name) or (rows_of(name, options.policy),)
    if tuple(size < 0 for size in shape) != (True,) * len(symbols) + (False,) * (len(shape) - len(symbols)):
        raise ValueError(f"{graph}: {name} has shape {tuple(shape)}, expected {len(symbols)} dynamic dimensions first")
    sizes = size_ranges(options, profile)
    fixed = shape[len(symbols) :]
    if symbols[0] in ("pages", "state_pages"):
        maximum = max_pages(options, fixed)
        sizes[symbols[0]] = Range(1, min(OPTIMAL_PAGES, maximum), maximum)
    return (*(sizes[symbol] for symbol in symbols), *(Range(size, size, size) for size in fixed))
