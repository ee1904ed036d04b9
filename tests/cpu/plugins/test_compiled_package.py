"""The operators inside an AOTInductor package: dynamic shapes, pools written in place, no Python needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import plugins
from kvforge.compiler.package_cache import package_writer
from plugins.build import build_library
from plugins.kv_quantization import dynamic_scale, quantize
from tests.support.rounding import assert_near, sum_error

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 4, 2, 32, 16, 24
ROUNDING = sum_error(HEAD_DIM, PAGES * PAGE_SIZE, PAGES * PAGE_SIZE)
"""A score sums over the head's dimensions, softmax and values over keys, of which the pools hold no more."""
ROOT = Path(plugins.__file__).parent.parent


class Step(nn.Module):
    """Writes T tokens, then attends R of them, given as a suffix of each sequence."""

    def forward(self, x, cos, sin, slots, survivors, starts, lengths, table, k_pool, v_pool) -> Tensor:
        q, k, v = (x * 1.5).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        k_pool, v_pool = plugins.rope_paged_kv_write(k, v, cos, sin, slots, k_pool, v_pool)
        q = q.index_select(0, survivors)
        return plugins.paged_attention(q, k_pool, v_pool, starts, lengths, table, HEAD_DIM**-0.5) + 1.0


class StepOnE4m3(nn.Module):
    """The same on a cache of e4m3 with a scale per token and head."""

    def forward(self, x, cos, sin, slots, survivors, starts, lengths, table, k_pool, v_pool, k_scales, v_scales):
        q, k, v = x.view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        cache = plugins.rope_paged_kv_write(k, v, cos, sin, slots, k_pool, v_pool, k_scales, v_scales)
        q = q.index_select(0, survivors)
        step = (starts, lengths, table, HEAD_DIM**-0.5, 0)
        return plugins.paged_attention(q, cache[0], cache[1], *step, cache[2], cache[3]) + 1.0


def on_e4m3(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs of a step with both pools quantized, then their scales."""
    scales = [dynamic_scale(pool, torch.float8_e4m3fn) for pool in args[-2:]]
    pools = [quantize(x, s[..., None], torch.float8_e4m3fn) for x, s in zip(args[-2:], scales, strict=True)]
    return (*args[:-2], *pools, *scales)


def step_inputs(queries: list[int], past: list[int], survivors: list[int]) -> tuple[Tensor, ...]:
    """New tokens, earlier tokens and survivors per sequence; both the pools hold random numbers."""
    gen = torch.Generator().manual_seed(sum(queries) + 7 * len(queries))
    tokens, sequences = sum(queries), len(queries)
    lengths = torch.tensor(queries) + torch.tensor(past)
    table = torch.randperm(PAGES, generator=gen)[: sequences * 5].view(sequences, 5)
    table = table[:, : max(1, -(-int(lengths.max()) // PAGE_SIZE))]
    slots, index, offset = [], [], 0
    for s, n in enumerate(queries):
        for p in range(past[s], past[s] + n):
            slots.append(int(table[s, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE)
        index += range(offset + n - survivors[s], offset + n)
        offset += n
    angle = torch.rand(tokens, HEAD_DIM // 2, generator=gen) * 100
    x = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=gen)
    pools = torch.randn(2, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=gen)
    starts = torch.tensor([0, *survivors]).cumsum(0)
    ints = [torch.as_tensor(t).int() for t in (slots, index, starts, lengths, table)]
    return (x, angle.cos(), angle.sin(), *ints, pools[0].clone(), pools[1].clone())


STEPS = {
    "prefill and decode": ([20, 1, 33], [0, 40, 12], [20, 1, 33]),
    "one token": ([1], [0], [1]),
    "one token of a long sequence": ([1], [70], [1]),
    "decode": ([1, 1, 1, 1], [5, 16, 31, 47], [1, 1, 1, 1]),
    "an idle sequence": ([0, 3], [9, 2], [0, 3]),
    "one survivor": ([30, 25], [0, 10], [0, 1]),
    "no survivors": ([30, 25], [0, 10], [0, 0]),
}


def compile_step(step: nn.Module, example: tuple[Tensor, ...], path: Path) -> Path:
    tokens, survivors, sequences, width = Dim("T"), Dim("R"), Dim("S_"), Dim("M")
    shapes = (
        *({0: tokens} for _ in range(4)),
        {0: survivors},
        {0: sequences + 1},
        {0: sequences},
        {0: sequences, 1: width},
        *(None for _ in example[8:]),
    )
    with package_writer() as write:
        write(torch.export.export(step, example, dynamic_shapes=shapes, strict=False), path)
    return path


EXAMPLE = ([40, 30, 9], [0, 20, 31], [20, 10, 9])


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    return compile_step(Step(), step_inputs(*EXAMPLE), tmp_path_factory.mktemp("package") / "step.pt2")


def reference_step(args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    x, cos, sin, slots, survivors, starts, lengths, table, k_pool, v_pool = args
    fused = (x * 1.5).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    k_pool, v_pool = k_pool.clone(), v_pool.clone()
    plugins.OPERATORS["rope_paged_kv_write"].reference(k, v, cos, sin, slots, k_pool, v_pool)
    out = plugins.OPERATORS["paged_attention"].reference(
        q[survivors.long()], k_pool, v_pool, starts, lengths, table, HEAD_DIM**-0.5, 0
    )
    return out + 1.0, k_pool, v_pool


def test_every_shape_of_step(package):
    step = torch._inductor.aoti_load_package(str(package))
    for name, sizes in STEPS.items():
        args = step_inputs(*sizes)
        out, k_pool, v_pool = reference_step(args)
        got = step(*args)
        assert_near(got, out, ROUNDING, name)
        # x * 1.5 may be fused into the write's input, hence not bit for bit.
        assert_near(args[-2], k_pool, ROUNDING, name)
        assert_near(args[-1], v_pool, ROUNDING, name)


def test_every_shape_of_step_on_e4m3(tmp_path):
    step = StepOnE4m3()
    path = compile_step(step, on_e4m3(step_inputs(*EXAMPLE)), tmp_path / "step.pt2")
    compiled = torch._inductor.aoti_load_package(str(path))
    for name, sizes in STEPS.items():
        args = on_e4m3(step_inputs(*sizes))
        want_args = tuple(x.clone() for x in args)
        want, got = step(*want_args), compiled(*args)
        assert_near(got, want, ROUNDING, name)
        for a, b in zip(args[8:], want_args[8:], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
        assert any(
            (a.float() != b.float()).any() for a, b in zip(args[8:], on_e4m3(step_inputs(*sizes))[8:], strict=True)
        )


SERVE = """
import sys, torch, plugins
_, library, package, data = sys.argv
plugins.load_library(library)
args, out, k_pool, v_pool = torch.load(data)
got = torch._inductor.aoti_load_package(package)(*args)
for a, b in ((got, out), (args[-2], k_pool), (args[-1], v_pool)):
    torch.testing.assert_close(a, b)
print("served with", plugins.load_library(library))
"""


def test_a_serving_process_uses_the_engines_copy_and_no_compiler(package, tmp_path):
    library = build_library(tmp_path / "engine" / "operators.so")
    args = step_inputs(*STEPS["prefill and decode"])
    torch.save((args, *reference_step(args)), tmp_path / "data.pt")
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(library), str(package), str(tmp_path / "data.pt")],
        env={"PATH": "", "KVFORGE_CACHE": str(tmp_path / "unused"), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert f"served with {library}" in result.stdout
    assert not (tmp_path / "unused").exists()
