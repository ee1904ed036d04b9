"""Products by AMX's tiles: the CPU's give every bit that arrays in their place give, in the same order of summation."""

import pytest
import torch

import plugins
from kvforge.common.hardware import best_isa
from plugins.packed_linear import pack
from plugins.packed_linear.cases import random_case as packed_linear_case
from plugins.paged_attention.cases import random_case as paged_attention_case

SEEDS = range(60)
HAS_AMX = best_isa() == "amx"
LINEAR, ATTENTION = (plugins.OPERATORS[name] for name in ("packed_linear", "paged_attention"))


def by(isa: str, monkeypatch, operator, args) -> torch.Tensor:
    monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
    return operator.call(*args)


@pytest.mark.skipif(not HAS_AMX, reason="needs AMX")
def test_a_cpu_with_amx_runs_it(monkeypatch):
    """bfloat16 sums of tiles have other bits than those of AVX512-BF16."""
    gen = torch.Generator().manual_seed(0)
    weight, _ = pack(torch.randn(64, 512, generator=gen).bfloat16(), torch.bfloat16)
    args = (torch.randn(4, 512, generator=gen).bfloat16(), weight, None, None, None, None, 64, 0.0, False, True)
    monkeypatch.delenv("KVFORGE_CPU_ISA", raising=False)
    chosen = LINEAR.call(*args)
    assert torch.equal(chosen, by("amx", monkeypatch, LINEAR, args))
    assert not torch.equal(chosen, by("avx512_bf16", monkeypatch, LINEAR, args))


@pytest.mark.skipif(not HAS_AMX, reason="needs AMX")
def test_linear_layers_have_the_bits_of_software_tiles(monkeypatch):
    for seed in SEEDS:
        args = packed_linear_case(seed)
        amx, software = (by(isa, monkeypatch, LINEAR, args) for isa in ("amx", "amx_software"))
        assert torch.equal(amx, software), seed


@pytest.mark.skipif(not HAS_AMX, reason="needs AMX")
def test_attention_has_the_bits_of_software_tiles(monkeypatch):
    for seed in SEEDS:
        args = paged_attention_case(seed, q_dtype=torch.bfloat16)
        amx, software = (by(isa, monkeypatch, ATTENTION, args) for isa in ("amx", "amx_software"))
        assert torch.equal(amx, software), seed


def test_int8_sums_are_those_of_the_vector_kernels(isas, monkeypatch):
    """Integers have one sum; a gate is computed in one way on AVX-512 and in another elsewhere."""
    for seed in SEEDS:
        args = packed_linear_case(5 * seed + 1, small=True)
        assert args[1].dtype == torch.int8
        gated = LINEAR.bind(*args)["gated"]
        alike = [isa for isa in isas if isa.startswith(("avx512", "amx"))] if gated else isas
        results = [by(isa, monkeypatch, LINEAR, args) for isa in alike]
        assert all(torch.equal(result, results[0]) for result in results), (seed, alike)


@pytest.mark.parametrize("group", [16, 17, 40])
def test_more_queries_of_a_kv_head_than_a_tile_has_rows(group, isas, monkeypatch):
    """A single token of a model with many query heads for one KV head, alone and as the last of a prompt."""
    torch.manual_seed(group)
    length, head_dim = 300, 64
    pool = torch.randn(2, 20, 16, 1, head_dim).bfloat16()
    q, table = torch.randn(length, group, head_dim).bfloat16(), torch.randperm(20)[None].int()

    def attend(begin: int) -> tuple:
        start, kv_length = torch.tensor([0, length - begin]).int(), torch.tensor([length]).int()
        return (q[begin:], pool[0], pool[1], start, kv_length, table, 0.125, 0, None, None, 1.0, 1.0)

    want = ATTENTION.reference(*attend(length - 1))
    for isa in isas:
        alone, whole = (by(isa, monkeypatch, ATTENTION, attend(begin)) for begin in (length - 1, 0))
        assert torch.equal(alone[0], whole[-1]), isa
        assert (alone.float() - want.float()).abs().max() < want.abs().max() * 2**-6, isa


@pytest.mark.skipif(not HAS_AMX, reason="needs AMX")
def test_torch_uses_tiles_on_the_same_threads():
    """Both configure the tiles of a thread, and neither may count on finding them as it left them."""
    gen = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(256, 256, generator=gen).bfloat16() for _ in range(2))
    packed, _ = pack(weight, torch.bfloat16)
    args = (x, packed, None, None, None, None, 256, 0.0, False, True)
    ours, theirs = LINEAR.call(*args), x @ weight.T
    for size in (256, 17, 1, 64, 256):
        for _ in range(5):
            assert torch.equal(x @ weight.T, theirs)
            assert torch.equal(LINEAR.call(x[:size], *args[1:]), ours[:size])
