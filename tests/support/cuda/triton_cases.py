"""The Triton backend of one operator against its reference under the interpreter, in a process of its own.

`python -m tests.support.cuda.triton_cases OPERATOR SEEDS` runs the random cases of these seeds and prints one JSON
line for each: {"seed": 3, "error": null} or what is wrong. Instead of an operator, `invariances` and `llama` are more
checks of attention, `steps` one of attention_mass, and `large` writes and reads the far end of a cache.
"""

import functools
import json
import sys
from collections.abc import Callable
from itertools import pairwise

import torch
import triton.language as tl

import tests.support.cuda.triton_interpreter  # noqa: F401 (first: it sets the interpreter right)
from plugins import triton_search
from plugins.attention_mass import cuda as attention_mass
from plugins.kv_quantization import LARGEST, dynamic_scale, quantize
from plugins.paged_attention import cuda as attention
from plugins.paged_attention.cases import random_case as paged_attention_case
from plugins.paged_attention.cuda_cases import SMALL
from plugins.registry import backend_modules, modules
from plugins.rope_paged_kv_write import cuda as kv_write
from tests.support.operators.cases import FLOATS, case, difference, reference, run
from tests.support.operators.mass_steps import by_name, in_steps, same, splittable

CUDA_CASES = dict(modules("cuda_cases"))


def operator_case(name: str, seed: int) -> str | None:
    """A random case, launched in each of the ways that the operator's `cuda_cases` names, else in its own; with numbers
    that are not finite in some cases of operators that take them."""
    args = case(name, seed, small=True, dtypes=FLOATS, not_finite=seed % 4 == 3)
    want = reference(name, args)
    default = [backend_modules("triton")[name].launch]
    for launch in getattr(CUDA_CASES.get(name), "launches", lambda *_: default)(seed, args):
        if wrong := difference(name, args, run(name, args, launch), want):
            return f"{wrong}, {launch}"
    return None


def invariance_case(seed: int) -> str | None:
    """A sequence's attention has the same bits alone as in its batch; a NaN query spoils its own row only."""
    args = list(paged_attention_case(seed, small=True, dtypes=FLOATS))
    whole = attention.launch(*args, tuning=SMALL)
    q, starts = args[0], args[3].tolist()
    for s, (begin, end) in enumerate(pairwise(starts)):
        alone = [*args]
        alone[0], alone[3] = q[begin:end], torch.tensor([0, end - begin], dtype=torch.int32)
        alone[4], alone[5] = args[4][s : s + 1], args[5][s : s + 1]
        if not torch.equal(attention.launch(*alone, tuning=SMALL), whole[begin:end]):
            return f"sequence {s} depends on its batch"
    if q.shape[0]:
        args[0] = q.clone()
        args[0][-1, 0, 0] = float("nan")
        spoiled = attention.launch(*args, tuning=SMALL)
        if not spoiled[-1, 0].isnan().all():
            return "a NaN query is hidden"
        spoiled[-1, 0] = whole[-1, 0]
        if not torch.equal(spoiled, whole):
            return "a NaN query reaches other rows"
    return None


def llama_case(seed: int) -> str | None:
    """Heads of Llama 3 in the block sizes of an H100: several splits, tiles and pages of 16 and 64."""
    gen = torch.Generator().manual_seed(seed)
    dtype = (torch.bfloat16, torch.float8_e4m3fn, torch.int8)[seed % 3]
    page_size, kv_heads, heads, head_dim = (64, 16)[seed % 2], 2, 8, 128
    queries, lengths = [1, 70, 1, 0, 3], [1300, 200, 512, 40, 3]
    columns = -(-max(lengths) // page_size)
    page_table = torch.randperm(len(lengths) * columns, generator=gen).view(len(lengths), columns).int()
    pools, scales = [], []
    for _ in range(2):
        values = torch.randn(page_table.numel(), page_size, kv_heads, head_dim, generator=gen)
        dynamic = dtype in LARGEST
        scales.append(dynamic_scale(values, dtype) if dynamic else None)
        pools.append(quantize(values, scales[-1][..., None], dtype) if dynamic else values.to(dtype))
    q = torch.randn(sum(queries), heads, head_dim, generator=gen).to(torch.bfloat16)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    args = (q, *pools, starts, torch.tensor(lengths).int(), page_table, head_dim**-0.5, 0, *scales, 1.0, 1.0)
    return difference("paged_attention", args, [attention.launch(*args)], reference("paged_attention", args))


def large_case(seed: int) -> str | None:
    """The last pages of pools of more than 2**31 elements, of which only these are touched."""
    page_size, kv_heads, head_dim, length = 16, 2, 32, 40
    pages = 2**31 // (page_size * kv_heads * head_dim) + 4
    gen = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, length, kv_heads, head_dim, generator=gen)
    angle = torch.rand(length, head_dim // 2, generator=gen)
    q = torch.randn(3, 2 * kv_heads, head_dim, generator=gen)
    positions, results = torch.arange(length), []
    for count, table in ((pages, torch.tensor([pages - 1, pages - 3, pages - 2])), (3, torch.arange(3))):
        pools = [torch.empty(count, page_size, kv_heads, head_dim, dtype=torch.int8) for _ in range(2)]
        slots = (table[positions // page_size] * page_size + positions % page_size).int()
        kv_write.launch(k, v, angle.cos(), angle.sin(), slots, *pools, k_scale=0.02, v_scale=0.03)
        for queries in (1, 3):  # split-KV decode, and a tile
            starts, lengths = torch.tensor([0, queries]).int(), torch.tensor([length]).int()
            args = (q[:queries], *pools, starts, lengths, table[None].int(), 0.2, 0, None, None, 0.02, 0.03)
            results.append(attention.launch(*args, tuning=SMALL))
            if count == 3:
                wrong = difference("paged_attention", args, [results[-1]], reference("paged_attention", args))
                if wrong:
                    return wrong
    return None if all(map(torch.equal, results[:2], results[2:])) else "the far end is not addressed"


def steps_case(seed: int) -> str | None:
    """Statistics have the same bits in whatever steps a sequence's queries come."""
    launch = functools.partial(attention_mass.launch, blocks=attention_mass.MassBlocks(16, 16))
    for one in splittable(by_name(seed, small=True, dtypes=FLOATS)):
        count = len(one["q"])
        if not same(in_steps(one, [1, count - 2, 1], launch), in_steps(one, [count], launch)):
            return "statistics depend on the steps"
    return None


CASES: dict[str, Callable[[int], str | None]] = {
    **{name: functools.partial(operator_case, name) for name in backend_modules("triton")},
    "invariances": invariance_case,
    "llama": llama_case,
    "steps": steps_case,
    "large": large_case,
}


def main() -> None:
    name, seeds = sys.argv[1], map(int, sys.argv[2].split(","))
    if name != "llama":  # small cases take the loops over sequences and over splits more than once
        triton_search._SEQUENCES, attention._MERGED = tl.constexpr(2), 256
    torch.set_num_threads(1)
    for seed in seeds:
        print(json.dumps({"seed": seed, "error": CASES[name](seed)}), flush=True)


if __name__ == "__main__":
    main()
