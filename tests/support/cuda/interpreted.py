"""The graphs of a small SwiftKV model with the Triton kernels in place of the operators, run by Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.support.cuda.interpreted

The kernels are started as a compiled graph records them (``plugins.cuda_ops.WrappedKernel``), on CPU tensors in fp32.
Prints JSON: for each cache format and step the largest difference of logits and of stored cache from the same graphs
on the operators' definitions, and what rounding allows, each relative to the largest value.
"""

import functools
import importlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import plugins
import tests.support.cuda.triton_interpreter  # noqa: F401 (first: it sets the interpreter right)
from model_defs import load_config
from model_defs.graphs import LowerGraph, UpperGraph
from plugins import cuda_ops
from tests.support.rounding import FEW_CODES, codes_apart, model_error, relative_error, turned_code_error

HF = {
    "model_type": "llama_swiftkv",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "swiftkv": True,
    "num_key_value_layers": 1,
    "key_value_group_size": 2,
}
PAGE_SIZE, PAGES, COLUMNS = 4, 12, 5
TOKENS = 13
"""The most that a sequence comes to have."""
STEPS = {"prefill": [7, 3], "mixed": [1, 5], "decode": [1, 1]}
SURVIVORS = {"prefill": [1, 0], "mixed": [1, 2], "decode": [1, 1]}
FORMATS = {"float32": (torch.float32, False), "int8": (torch.int8, True), "fp8": (torch.float8_e4m3fn, True)}
"""Cache formats: elements, and whether they have dynamic scales."""


@contextmanager
def operators(implementation: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """Run the operators on CPU tensors by ``implementation(name)`` within the block."""
    library = torch.library.Library("kvforge", "IMPL")
    for name in ("rope_paged_kv_write", "paged_attention"):
        library.impl(name, implementation(name), "CPU")
    try:
        yield
    finally:
        library._destroy()


def kernels(name: str) -> Callable[..., Any]:
    """Return the operator as the kernels that a compiled graph would hold."""
    return functools.partial(importlib.import_module(f"plugins.{name}.cuda").launch, wrap=cuda_ops.WrappedKernel)


def definition(name: str) -> Callable[..., Any]:
    """Return the operator's reference."""
    return plugins.OPERATORS[name].reference


def run(format_name: str) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Return logits and a copy of the pools after each of ``STEPS``, two sequences that grow."""
    config = load_config(HF)
    torch.manual_seed(0)
    lower, upper = LowerGraph(config).eval(), UpperGraph(config).eval()
    for parameter in [*lower.parameters(), *upper.parameters()]:
        parameter.data = torch.randn(parameter.shape) * 0.3
    dtype, dynamic = FORMATS[format_name]
    shape = (PAGES, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    elements = [torch.zeros(shape).to(dtype) for _ in range(2 * len(config.owners))]
    pools: list[tuple[Tensor, ...]] = [
        (*pair, *(torch.zeros(shape[:3]) for _ in range(2 * dynamic)))
        for pair in zip(elements[::2], elements[1::2], strict=True)
    ]
    table = torch.randperm(PAGES)[: 2 * COLUMNS].view(2, COLUMNS).int()
    lengths = torch.zeros(2, dtype=torch.int32)
    results = {}
    for step, counts in STEPS.items():
        positions = torch.cat([torch.arange(int(n), int(n) + c) for n, c in zip(lengths, counts, strict=True)]).int()
        owner = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
        slots = table[owner, positions.long() // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        lengths = lengths + torch.tensor(counts, dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        ids = torch.randint(0, config.vocab_size, positions.shape).int()
        kept = SURVIVORS[step]
        index = [int(end) - k + i for end, k in zip(starts[1:], kept, strict=True) for i in range(k)]
        hidden = lower(ids, positions, slots.int(), starts, lengths, table, pools)
        logits = upper(
            hidden,
            torch.tensor(index).int(),
            torch.tensor([0, *kept]).cumsum(0).int(),
            positions,
            lengths,
            table,
            pools[config.cut :],
        )
        results[step] = (logits, [tensor.clone() for pool in pools for tensor in pool])
    return results


def stored_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error of stored floats; of codes, infinity where they differ by more than a few roundings."""
    if expected.dtype == torch.float32:
        return relative_error(actual, expected)
    apart = codes_apart(actual, expected)
    return 0.0 if apart.max() <= 1 and apart.bool().float().mean() <= FEW_CODES else math.inf


@torch.no_grad()
def main() -> None:
    """Compare all formats."""
    report: dict[str, dict[str, list[float]]] = {}
    for name, (dtype, dynamic) in FORMATS.items():
        turned = turned_code_error(dtype, HF["head_dim"]) if dynamic else 0.0
        with operators(definition):
            expected = run(name)
        with operators(kernels):
            actual = run(name)
        report[name] = {
            step: [
                model_error(load_config(HF), TOKENS) + turned,
                relative_error(actual[step][0], expected[step][0]),
                max(map(stored_difference, actual[step][1], expected[step][1])),
            ]
            for step in STEPS
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
