"""Products by AMX's tiles: the CPU's give every bit that arrays in their place give, in the same order of summation."""

import pytest
import torch

import plugins
from kvforge.common.hardware import best_isa
from plugins.packed_linear import pack
from plugins.packed_linear.cases import random_case as packed_linear_case
from plugins.paged_attention.cases import random_case as paged_attention_case

NUM_CASES, NUM_DAILY = 60, 20
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
def test_linear_layers_have_the_bits_of_software_tiles(seeds, monkeypatch):
    for seed in seeds(NUM_DAILY, NUM_CASES):
        args = packed_linear_case(seed)
        amx, software = (by(isa, monkeypatch, LINEAR, args) for isa in ("amx", "amx_software"))
        assert torch.equal(amx, software), seed


@pytest.mark.skipif(not HAS_AMX, reason="needs AMX")
def test_attention_has_the_bits_of_software_tiles(seeds, monkeypatch):
    for seed in seeds(NUM_DAILY, NUM_CASES):
        args = paged_attention_case(seed, q_dtype=torch.bfloat16, mixed=True)
        amx, software = (by(isa, monkeypatch, ATTENTION, args) for isa in ("amx", "amx_software"))
        assert torch.equal(amx, software), seed


def test_int8_sums_are_those_of_the_vector_kernels(isas, seeds, monkeypatch):
    """Integers have one sum; a gate is computed in one way on AVX-512 and in another elsewhere."""
    for seed in seeds(NUM_DAILY, NUM_CASES):
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


def tile_isas(isas: list[str]) -> list[str]:
    tiles = [isa for isa in isas if isa.startswith("amx")]
    return tiles or pytest.skip("needs AVX512-BF16")


def exact_attention(q, k, v, scale: float) -> torch.Tensor:
    """Of queries that see all keys, in float64: [queries, head_dim]."""
    q, k, v = (x.double() for x in (q, k, v))
    return torch.softmax(q @ k.T * scale, -1) @ v


def paged(x: torch.Tensor) -> torch.Tensor:
    """[keys, head_dim] as a pool of one KV head."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 16)).view(-1, 16, 1, x.shape[1])


def one_head(q, k, v, scale: float = 1.0) -> tuple:
    """Arguments for queries of the last token, heads of one KV head."""
    keys, pages = k.shape[0], -(-k.shape[0] // 16)
    step = (torch.tensor([0, 1]).int(), torch.tensor([keys]).int(), torch.arange(pages).int()[None])
    return (q[None], paged(k), paged(v), *step, scale, 0, None, None, 1.0, 1.0)


def test_exponentials_in_float16_cost_no_accuracy(isas, monkeypatch):
    """1000 random cases against float64, beside the kernel that computes them in float32: flat and peaked weights."""
    gen = torch.Generator().manual_seed(0)
    chosen = [*tile_isas(isas), "avx512_bf16"]
    errors = {isa: [] for isa in chosen}
    for _ in range(1000):
        keys = int(torch.randint(1, 700, (), generator=gen))
        spread = 10 ** float(torch.rand((), generator=gen) * 3 - 1.5)
        q, k, v = (torch.randn(n, 64, generator=gen).bfloat16() for n in (12, keys, keys))
        want = exact_attention(q, k, v, spread / 8)
        for isa, of_isa in errors.items():
            got = by(isa, monkeypatch, ATTENTION, one_head(q, k, v, spread / 8))[0].double()
            of_isa.append(((got - want).square().mean() / want.square().mean()).sqrt())
    means = {isa: float(torch.stack(of_isa).mean()) for isa, of_isa in errors.items()}
    for isa in chosen[:-1]:
        assert means[isa] < 1.1 * means["avx512_bf16"], means
        assert max(errors[isa]) < 2**-7, isa


@pytest.mark.parametrize("above", [20.0, 31.0, 50.0, 1e3, 1e6, 1e30])
def test_a_key_far_above_the_first_ones(above, isas, monkeypatch):
    """A block's weights are made by its first keys' scores, again where a later one is too far above them."""
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 64, generator=gen).bfloat16() for n in (300, 300, 300))
    q[:, 0], k[:, 0] = 1, 0
    k[[40, 290], 0] = above
    for group in (1, 4):
        start, length, table = torch.tensor([0, 300]).int(), torch.tensor([300]).int(), torch.arange(19).int()[None]
        rest = (length, table, 1.0, 0, None, None, 1.0, 1.0)
        heads = q[:, None].expand(-1, group, -1).contiguous()
        for isa in tile_isas(isas):
            prompt = by(isa, monkeypatch, ATTENTION, (heads, paged(k), paged(v), start, *rest))
            for token in (39, 40, 100, 299):
                want = exact_attention(q[token], k[: token + 1], v[: token + 1], 1.0)
                assert (prompt[token, 0].double() - want).abs().max() < 2**-6 * want.abs().max(), (isa, token)
            alone = (heads[299:], paged(k), paged(v), torch.tensor([0, 1]).int(), *rest)
            assert torch.equal(by(isa, monkeypatch, ATTENTION, alone)[0], prompt[299]), isa


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_shows_where_it_is_seen(value, isas, monkeypatch):
    """A key of NaN or of infinities makes the tokens that see it NaN, none before them, in prompts as in decoding."""
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(300, 64, generator=gen).bfloat16() for _ in range(3))
    k[270, 5], q[:, 5] = value, 1
    start, length, table = torch.tensor([0, 300]).int(), torch.tensor([300]).int(), torch.arange(19).int()[None]
    rest = (length, table, 0.125, 0, None, None, 1.0, 1.0)
    for isa in tile_isas(isas):
        out = by(isa, monkeypatch, ATTENTION, (q[:, None], paged(k), paged(v), start, *rest))
        alone = (q[299:, None], paged(k), paged(v), torch.tensor([0, 1]).int(), *rest)
        assert out[:270].isfinite().all()
        assert out[270:].isnan().all() if value != float("-inf") else out.isfinite().all()
        assert torch.equal(by(isa, monkeypatch, ATTENTION, alone)[0].isnan(), out[299].isnan())
