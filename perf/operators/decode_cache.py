"""Times attention of a decode step over a long cache in every format, beside a bfloat16 cache and a plain read.

    python -m perf.operators.decode_cache --output perf/results/decode-cache-cpu

The default is a layer of the 213M model, 8 sequences of 8192 tokens. Formats take turns; of each the best time counts.
A run reads pools that no cache of the CPU holds any more: they lie in large pages, as an engine's do, and there are as
many as fill --megabytes. With --cpu-time it is CPU time of one thread, for a machine whose cores other programs share.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import plugins
from kvforge.common.number_formats import KV_FORMATS
from kvforge.runtime.sessions.huge_pages import allocate_together
from perf.harness.experiment import Experiment, Report, flag, number, option, output, positive_float
from plugins.benchmark import KV_DTYPES, PAGE_SIZE, caches
from plugins.grouped_attention import grouped_attention
from plugins.paged_attention import paged_attention
from plugins.seal_pages import seal_pages
from plugins.seal_pages.layout import sealed_shapes

BASELINE = "bfloat16"
GROUPED = {"kivi2": 2, "kivi3": 3, "kivi4": 4}
"""Formats of sealed pages, and their bits."""
FORMATS = (BASELINE, *(name for name, dtype in KV_DTYPES.items() if dtype is not None), *GROUPED)


def in_large_pages(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies as an engine's pools lie in memory."""
    copies = allocate_together([(x.shape, x.dtype) for x in tensors])
    for copy, x in zip(copies, tensors, strict=True):
        copy.view(torch.uint8).copy_(x.contiguous().view(torch.uint8))
    return copies


def pages_of(args: argparse.Namespace) -> tuple[tuple[int, ...], Tensor]:
    """Return the shape of a pool of all sequences' pages, and their table."""
    width = -(-args.length // PAGE_SIZE)
    table = torch.randperm(args.sequences * width).view(args.sequences, width).int()
    return (args.sequences * width, PAGE_SIZE, args.kv_heads, args.head_dim), table


def query_of(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query of each sequence, where they begin, and the sequences' lengths."""
    q = torch.randn(args.sequences, args.heads, args.head_dim).bfloat16()
    return q, torch.arange(args.sequences + 1).int(), torch.full((args.sequences,), args.length).int()


def turns_of(args: argparse.Namespace, tensors: list[Tensor]) -> "itertools.cycle[list[Tensor]]":
    """Return as many copies of the tensors as fill ``--megabytes``, in turn."""
    num_bytes = sum(x.nbytes for x in tensors)
    return itertools.cycle([in_large_pages(tensors) for _ in range(-(-args.megabytes * 10**6 // num_bytes))])


def step_of(args: argparse.Namespace, name: str) -> tuple[Callable[[], Any], int]:
    """Return what runs attention over the next pools of this format, and the bytes that it reads."""
    if name in GROUPED:
        return grouped_step(args, GROUPED[name])
    (shape, table), (q, starts, lengths) = pages_of(args), query_of(args)
    kv_dtype = "same" if name == BASELINE else name
    made = caches((torch.randn(shape).bfloat16() for _ in "kv"), kv_dtype)
    tensors = [values for values, _ in made] + [scales for _, scales in made if scales is not None]
    turns, rotates = turns_of(args, tensors), KV_FORMATS[name].may_rotate_keys

    def step() -> None:
        k, v, *scales = next(turns)
        paged_attention(q, k, v, starts, lengths, table, args.head_dim**-0.5, 0, *scales, rotates_keys=rotates)

    return step, sum(x.nbytes for x in tensors)


def grouped_step(args: argparse.Namespace, bits: int) -> tuple[Callable[[], Any], int]:
    """Return it for pages sealed in so many bits, of which each sequence's newest is exact."""
    (shape, table), (q, starts, lengths) = pages_of(args), query_of(args)
    exact_k, exact_v = (torch.randn(shape).bfloat16() for _ in "kv")
    sealed = [torch.zeros(shape[0], *own, dtype=dtype) for own, dtype in sealed_shapes(*shape[1:], bits).values()]
    pairs = torch.arange(shape[0]).int()[:, None].expand(-1, 2)
    seal_pages(exact_k, exact_v, pairs, sealed[0], sealed[1], sealed[2], sealed[3])
    num_own = (args.length - 1) % PAGE_SIZE + 1
    newest = table[:, -1].long()
    exact_table = torch.arange(args.sequences).int()[:, None].expand_as(table)
    turns = turns_of(args, [*sealed, exact_k[newest], exact_v[newest]])

    def step() -> None:
        k, v, k_groups, v_groups, own_k, own_v = next(turns)
        rest = starts, lengths, table, exact_table, args.head_dim**-0.5
        grouped_attention(q, k, v, k_groups, v_groups, own_k, own_v, *rest)

    num_sealed = shape[0] - args.sequences
    exact_bytes = args.sequences * num_own * 2 * args.kv_heads * args.head_dim * exact_k.element_size()
    return step, num_sealed * sum(x[0].nbytes for x in sealed) + exact_bytes


def best_ms(function: Callable[[], Any], args: argparse.Namespace) -> float:
    """Return the shortest run of those that fit into ``args.seconds``, after one that is not counted."""
    clock = time.thread_time if args.cpu_time else time.perf_counter
    function()
    times, end = [], time.perf_counter() + args.seconds
    while not times or time.perf_counter() < end:
        begin = clock()
        function()
        times.append(clock() - begin)
    return 1e3 * min(times)


def measure(args: argparse.Namespace) -> Report:
    """Time every format."""
    torch.set_num_threads(1 if args.cpu_time else args.threads)
    torch.manual_seed(0)
    plugins.load_library()
    source = torch.ones(args.megabytes * 10**6 // 4, dtype=torch.int32)
    steps = {name: step_of(args, name) for name in FORMATS}
    reads: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.turns):
        reads.append(best_ms(lambda: torch.amax(source), args))
        for name, (step, _) in steps.items():
            found[name].append(best_ms(step, args))
    rate = source.nbytes / min(reads) / 1e6
    rows = [
        {"format": name, "bytes": num_bytes, "ms": min(found[name]), "gb_per_s": num_bytes / min(found[name]) / 1e6}
        | {"floor_ms": num_bytes / rate / 1e6, "times_as_fast": min(found[BASELINE]) / min(found[name])}
        for name, (_, num_bytes) in steps.items()
    ]
    return {"read_gb_per_s": rate, "rows": rows}


SIZES = (("sequences", 8), ("length", 8192), ("heads", 16), ("kv-heads", 4), ("head-dim", 64))
EXPERIMENT = Experiment(
    "perf.operators.decode_cache", __doc__,
    options=(
        *(number(f"--{name}", default, "(default %(default)s)") for name, default in SIZES),
        number("--threads", torch.get_num_threads()),
        number("--megabytes", 150, "of pools of a format (default %(default)s)"),
        number("--turns", 5, "(default %(default)s)"),
        option("--seconds", type=positive_float, default=0.5, help="of a format in a turn (default %(default)s)"),
        flag("--cpu-time", "measure CPU time, of one thread"), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, settings=("sequences", "length", "heads", "kv_heads", "head_dim", "turns"), is_dated=True,
    title="Attention over caches of every format",
    notes="Attention of one layer, {sequences} sequences of {length} tokens, {heads} heads and {kv_heads} KV heads of "
    "{head_dim}. Best of {turns} turns. The floor is what is read, scales and groups included, at the rate of a plain "
    "read, {read_gb_per_s:.1f} GB/s.",
    columns=(
        ("cache", "format"), ("MB read", "bytes", ".1f", 1e-6), ("ms", "ms", ".3f"), ("GB/s", "gb_per_s", ".1f"),
        ("floor ms", "floor_ms", ".3f"), ("times as fast as bfloat16", "times_as_fast", ".2f"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
