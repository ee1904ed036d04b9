"""PagedAttention on CPU against its reference, its invariances, and what it refuses."""

import pytest
import torch
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

import plugins
from plugins.cases import ALL_FORMATS, K8V4, MIXED_FORMATS, CacheFormat
from plugins.kv_quantization import INT4, LARGEST, dequantize, dynamic_scale, quantize
from plugins.kv_rotation import rotate_blocks
from plugins.paged_attention.cases import random_case as paged_attention_case
from tests.support.operators.cases import difference

REFERENCE = plugins.OPERATORS["paged_attention"].reference
DTYPES = (torch.float32, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
EIGHT_BIT = (E4M3, torch.int8)
SINK_ERROR = 1e-6
"""A sink's logarithm and power are each off by some roundings of float32, 6e-8."""
# Dtype of the queries and format of the cache: every pair of a kernel and a way to read the pools.
KINDS = {
    "float32": (torch.float32, CacheFormat(torch.float32)),
    "bfloat16": (torch.bfloat16, CacheFormat(torch.bfloat16)),
    "float32 on e4m3": (torch.float32, CacheFormat(E4M3, dynamic=True)),
    "bfloat16 on e4m3": (torch.bfloat16, CacheFormat(E4M3, dynamic=True)),
    "bfloat16 on int8": (torch.bfloat16, CacheFormat(torch.int8, dynamic=True)),
    "bfloat16 on static e4m3": (torch.bfloat16, CacheFormat(E4M3)),
    "float32 on int4": (torch.float32, CacheFormat(INT4, dynamic=True)),
    "bfloat16 on int4": (torch.bfloat16, CacheFormat(INT4, dynamic=True)),
    "float32 on int8 keys, int4 values": (torch.float32, K8V4),
    "bfloat16 on int8 keys, int4 values": (torch.bfloat16, K8V4),
}
each_kind = pytest.mark.parametrize(("dtype", "cache"), KINDS.values(), ids=KINDS)


def cached(vectors: torch.Tensor, cache: CacheFormat) -> tuple[list[torch.Tensor], list[torch.Tensor | None], float]:
    """What pools hold of these float32 vectors `[2, ...]` of K and V, their scales, and the scale of all."""
    pools, scales = [], []
    for x, dtype in zip(vectors, cache.pair(torch.float32), strict=True):
        scales.append(dynamic_scale(x, dtype) if cache.dynamic else None)
        if dtype not in LARGEST:
            pools.append(x.to(dtype))
        else:
            pools.append(quantize(x, 0.01 if scales[-1] is None else scales[-1][..., None], dtype))
    return pools, scales, 0.01 if cache.dtype in LARGEST and not cache.dynamic else 1.0


def tolerance(q: torch.Tensor) -> float:
    """Largest error, relative to the largest element of the result."""
    return 4e-6 if q.dtype == torch.float32 else 1e-2


def attend(*args) -> torch.Tensor:
    return torch.ops.kvforge.paged_attention(*args)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


@each_kind
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("size", [1e9, 1e18])
def test_huge_scores_pick_their_keys(dtype, cache, queries, size, isas, monkeypatch):
    """Scores far beyond what their differences resolve: all weight is on the largest, and nothing becomes NaN."""
    torch.manual_seed(0)
    keys, head_dim = 100, 64
    pools, scales, scale = cached(torch.randn(2, 8, 16, 1, head_dim), cache)
    q = (torch.randn(queries, 4, head_dim) * size).to(dtype)
    rest = (torch.tensor([0, queries]).int(), torch.tensor([keys]).int(), torch.arange(8).int()[None], 0.125, 0)
    args = (q, *pools, *rest, *scales, scale, scale)
    want = REFERENCE(*args)
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        assert relative_error(attend(*args), want) < tolerance(q), isa


@each_kind
@pytest.mark.parametrize("window", [0, 700])
def test_long_keys_are_split_and_merged(dtype, cache, window, isas, monkeypatch):
    """Several splits in both kinds of work: one query, and a short chunk after a long past."""
    torch.manual_seed(0)
    page_size, kv_heads, head_dim = 32, 2, 64
    pools, scales, scale = cached(torch.randn(2, 160, page_size, kv_heads, head_dim), cache)
    page_table = torch.randperm(160).view(2, 80).int()
    lengths = torch.tensor([2500, 2431]).int()
    query_start = torch.tensor([0, 1, 61]).int()
    q = torch.randn(61, 2 * kv_heads, head_dim).to(dtype)
    args = (q, *pools, query_start, lengths, page_table, 0.25, window, *scales, scale, scale)
    want = REFERENCE(*args)
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        assert relative_error(attend(*args), want) < tolerance(q), isa


def kind_case(seed: int, dtype: torch.dtype, cache: CacheFormat) -> tuple:
    if cache.dtype in LARGEST:
        return paged_attention_case(seed, q_dtype=dtype, formats=(cache,))
    return paged_attention_case(seed, q_dtype=dtype, pool_dtype=cache.dtype)


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(1, 4)])
def test_refuses_sinks_that_are_not_one_for_each_head(sinks):
    with pytest.raises(RuntimeError, match=r"paged_attention: sinks must be float32 \[4\]"):
        plugins.paged_attention(**arguments(), sinks=sinks)


def one_sequence(args: tuple, s: int) -> tuple:
    q, k_pool, v_pool, query_start, kv_length, page_table, *rest = args
    begin, end = query_start[s : s + 2].tolist()
    start = torch.tensor([0, end - begin], dtype=torch.int32)
    return q[begin:end], k_pool, v_pool, start, kv_length[s : s + 1], page_table[s : s + 1], *rest


@pytest.mark.parametrize("block", range(4))
def test_sinks_are_those_of_the_reference(block, isas, monkeypatch, seeds):
    """In every kind of work and every format, with sinks that are as good as none and sinks that take all weight."""
    for seed in (4 * each + block for each in seeds(12, 40)):
        args = paged_attention_case(seed, sinks=True, mixed=True)
        want = [REFERENCE(*args)]
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            assert difference("paged_attention", args, [attend(*args)], want) is None, (seed, isa)


@each_kind
def test_a_sink_leaves_a_part_of_the_result(dtype, cache, isas, monkeypatch):
    """As much as all keys together: half of it; less than any of them: the same bits as without; far more: nothing."""
    args = kind_case(3, dtype, cache)
    num_heads = args[0].shape[1]
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        whole = attend(*args)
        assert torch.equal(attend(*args, torch.full((num_heads,), -1e30)), whole), isa
        assert not attend(*args, torch.full((num_heads,), 1e30)).any(), isa
        sink = torch.linspace(-3, 3, num_heads)
        lone = attend(*args, sink)  # of each head, whatever the other heads have
        assert torch.equal(attend(*args, sink.where(torch.arange(num_heads) == 0, -1e30))[:, 0], lone[:, 0]), isa
    key = torch.zeros(1, 16, 1, 64, dtype=torch.float32)
    one = (torch.ones(1, 2, 64), key, key + 1.0, ints(0, 1), ints(4), ints([0]), 1.0)
    half = attend(*one, 0, None, None, 1.0, 1.0, torch.tensor([4.0, 12.0]).log())
    assert relative_error(half, torch.tensor([0.5, 0.25])[None, :, None].expand(1, 2, 64)) < SINK_ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, *EIGHT_BIT])
def test_slots_may_all_be_one(dtype, isas, monkeypatch):
    """Pools whose slots are zero bytes apart."""
    q, pool = torch.ones(1, 4, 64).bfloat16(), torch.ones(4, 1, 2, 64).to(dtype).expand(4, 16, 2, 64)
    scales = (torch.ones(4, 16, 2),) * 2 if dtype in EIGHT_BIT else (None, None)
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        for start in (ints(0, 1), ints(0, 1, 1)):
            sequences = len(start) - 1
            table = torch.arange(4).int().expand(sequences, 4)
            lengths = ints(*(33,) * sequences)
            assert torch.equal(attend(q, pool, pool, start, lengths, table, 0.1, 0, *scales), q), isa


@each_kind
def test_a_sequence_does_not_depend_on_its_neighbours(dtype, cache, isas, monkeypatch, seeds):
    for seed in seeds(12, 25):
        args = kind_case(seed, dtype, cache)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            together = attend(*args)
            starts = args[3].tolist()
            for s in range(len(starts) - 1):
                alone = attend(*one_sequence(args, s))
                assert torch.equal(alone, together[starts[s] : starts[s + 1]]), (seed, isa, s)


@each_kind
def test_the_number_of_threads_changes_no_bit(dtype, cache):
    threads = torch.get_num_threads()
    try:
        for seed in range(20):
            args = kind_case(seed, dtype, cache)
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(attend(*args))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]), seed
    finally:
        torch.set_num_threads(threads)


@each_kind
def test_physical_pages_and_page_size_change_no_bit(dtype, cache, isas, monkeypatch):
    torch.manual_seed(1)
    length, kv_heads, head_dim, window = 600, 2, 80, 0
    keys, key_scales, scale = cached(torch.randn(2, length, kv_heads, head_dim), cache)
    for queries in (1, 3, 200):
        q = torch.randn(queries, 6, head_dim).to(dtype)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            results = []
            for page_size in (1, 16, 16, 100):
                pages = -(-length // page_size)
                shape = (pages + 3, page_size, kv_heads)
                pools = [torch.full((*shape, x.shape[-1]), float("nan")).to(x.dtype) for x in keys]
                scales = [None if x is None else torch.full(shape, float("nan")) for x in key_scales]
                page_table = torch.randperm(pages + 3)[:pages].int()
                key = torch.arange(length)
                place = page_table[key // page_size].long(), key % page_size
                for target, source in zip((*pools, *scales), (*keys, *key_scales), strict=True):
                    if target is not None:
                        target[place] = source
                start, kv_length = torch.tensor([0, queries]).int(), torch.tensor([length]).int()
                table = (start, kv_length, page_table[None])
                results.append(attend(q, *pools, *table, 0.1, window, *scales, scale, scale))
            assert results[0].isfinite().all()
            assert all(torch.equal(results[0], result) for result in results[1:]), (queries, isa)


@pytest.mark.parametrize("dynamic", [True, False])
def test_every_stored_number_is_read_exactly(dynamic, isas, monkeypatch):
    """One key: the result is its V, every e4m3 or int8 number once, subnormal and negative ones included."""
    for pool_dtype in EIGHT_BIT:
        values = torch.arange(256, dtype=torch.uint8).view(pool_dtype)
        v_pool = values.view(4, 1, 1, 64)
        k_pool = torch.zeros(4, 1, 1, 64).to(pool_dtype)
        scales = (
            (torch.full((4, 1, 1), 0.5), torch.full((4, 1, 1), 2.0), 1.0, 1.0) if dynamic else (None, None, 0.5, 2.0)
        )
        want = v_pool.view(4, 1, 64).float() * 2
        for dtype in DTYPES:
            q = torch.ones(4, 1, 64, dtype=dtype)
            for isa in isas:
                monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                table = (ints(0, 1, 2, 3, 4), ints(1, 1, 1, 1), torch.arange(4).int()[:, None])
                got = attend(q, k_pool, v_pool, *table, 1.0, 0, *scales).float()
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 20])
def test_every_pair_of_4_bit_numbers_is_read(head_dim, isas, monkeypatch):
    """One key: the result is its V, rotated back; every byte is in some place of a head."""
    num_rows = -(-256 // (head_dim // 2)) + 3
    stored = (torch.arange(num_rows * head_dim // 2) * 37 % 256).to(INT4).view(num_rows, 1, 1, head_dim // 2)
    assert len(stored.unique()) == 256
    scales = torch.full((num_rows, 1, 1), 2.0)
    want = rotate_blocks(dequantize(stored, scales)).view(num_rows, 1, head_dim)
    assert want.abs().max() >= 16  # -8 is read, though nothing writes it
    lengths, starts = torch.ones(num_rows).int(), torch.arange(num_rows + 1).int()
    for dtype in DTYPES:
        q = torch.ones(num_rows, 1, head_dim, dtype=dtype)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            table = (starts, lengths, torch.arange(num_rows).int()[:, None])
            got = attend(q, torch.zeros_like(stored), stored, *table, 1.0, 0, scales, scales)
            assert relative_error(got, want) < tolerance(q), isa


def test_a_scale_that_is_not_finite_shows_only_where_its_key_is_seen(isas, monkeypatch):
    """The last of 40 keys has the scale infinity: the last query shows it, none of the others does."""
    for pool_dtype in LARGEST:
        pool = quantize(torch.randn(3, 16, 2, 64), 1.0, pool_dtype)
        pool[2, 7] = 0  # what a write stores of finite numbers beside an infinity
        for bad in range(2):
            scales = [torch.rand(3, 16, 2) + 0.5 for _ in range(2)]
            scales[bad][2, 7] = float("inf")
            for dtype in DTYPES:
                q = torch.randn(40, 4, 64).to(dtype)
                for isa in isas:
                    monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                    table = (ints(0, 40), ints(40), ints([0, 1, 2]))
                    out = attend(q, pool, pool, *table, 0.1, 0, *scales)
                    assert not out[-1].isfinite().all()
                    assert out[:-1].isfinite().all(), (pool_dtype, bad, dtype, isa)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 8, 16])
def test_a_key_has_the_scale_of_its_own_head(kv_heads, isas, monkeypatch):
    """Each key's and each head's scale differs; the lengths end at, before and behind the ends of pages and vectors."""
    gen = torch.Generator().manual_seed(kv_heads)
    for pool_dtype in LARGEST:
        for page_size, length in ((16, 47), (16, 64), (32, 33), (5, 23)):
            pages = -(-length // page_size)
            numbers = torch.randn(2, pages, page_size, kv_heads, 32, generator=gen)
            scales = torch.rand(2, pages, page_size, kv_heads, generator=gen) + 0.1
            pools = quantize(numbers / numbers.abs().amax() * LARGEST[pool_dtype], 1.0, pool_dtype)
            table = (ints(0, 1), ints(length), torch.randperm(pages, generator=gen).int()[None])
            for dtype in DTYPES:
                q = torch.randn(1, 2 * kv_heads, 32, generator=gen).to(dtype)
                args = (q, pools[0], pools[1], *table, 0.01, 0, scales[0], scales[1])
                want = REFERENCE(*args)
                for isa in isas:
                    monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                    assert relative_error(attend(*args), want) < tolerance(q), (pool_dtype, page_size, length, isa)


@each_kind
@pytest.mark.parametrize(("head_dim", "window"), [(64, 0), (80, 0), (64, 301), (37, 50)])
def test_chunks_change_no_bit(dtype, cache, head_dim, window, isas, monkeypatch):
    """A few queries at once are not packed, and short chunks split their keys: a row is summed in one order."""
    if INT4 in cache.pair(dtype) and head_dim % 2:
        return
    torch.manual_seed(6)
    length, page_size, kv_heads, group = 700, 16, 2, 4
    pools, scales, scale = cached(torch.randn(2, 44, page_size, kv_heads, head_dim), cache)
    page_table = torch.randperm(44)[None].int()
    q = torch.randn(length, kv_heads * group, head_dim).to(dtype)

    def run(begin: int, end: int) -> torch.Tensor:
        start, kv_length = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
        return attend(q[begin:end], *pools, start, kv_length, page_table, 0.125, window, *scales, scale, scale)

    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        whole = run(0, length)
        for begin, end in [(699, 700), (697, 700), (511, 513), (18, 19), (680, 700), (90, 690)]:
            assert torch.equal(run(begin, end), whole[begin:end]), (isa, begin, end)


def test_nothing_to_do():
    pool = torch.zeros(1, 16, 2, 64)
    q = torch.zeros(0, 4, 64)
    none, table = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)
    assert plugins.paged_attention(q, pool, pool, torch.zeros(1).int(), none, table, 1.0).shape == (0, 4, 64)
    idle = torch.tensor([5, 0]).int()
    table = torch.full((2, 1), 99).int()
    assert plugins.paged_attention(q, pool, pool, torch.zeros(3).int(), idle, table, 1.0).shape == (0, 4, 64)


def arguments() -> dict:
    return {
        "q": torch.randn(3, 4, 64),
        "k_pool": torch.zeros(4, 16, 2, 64),
        "v_pool": torch.zeros(4, 16, 2, 64),
        "query_start": torch.tensor([0, 1, 3]).int(),
        "kv_length": torch.tensor([20, 2]).int(),
        "page_table": torch.tensor([[3, 1], [0, 99]]).int(),
        "scale": 0.125,
        "window": 0,
    }


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.randn(3, 4, 32)),
        ("q", torch.randn(3, 3, 64)),
        ("q", torch.randn(3, 256)),
        ("q", torch.randn(3, 4, 64).half()),
        ("k_pool", torch.zeros(4, 16, 128)),
        ("k_pool", torch.zeros(4, 16, 2, 64).double()),
        ("k_pool", torch.zeros(4, 16, 2, 64).to(torch.float8_e5m2)),
        ("v_pool", torch.zeros(4, 16, 2, 64).to(torch.int8)),
        ("k_scale", 2.0),
        ("v_scale", 0.5),
        ("query_start", ints(0, 2**31 - 1, -(2**31))),
        ("v_pool", torch.zeros(5, 16, 2, 64)),
        ("v_pool", torch.zeros(4, 16, 2, 64).bfloat16()),
        ("query_start", ints(0, 1, 4)),
        ("query_start", ints(1, 2, 3)),
        ("query_start", ints(0, 5, 3)),
        ("query_start", torch.tensor([0, 1, 3])),
        ("query_start", ints()),
        ("kv_length", ints(20)),
        ("kv_length", ints(20, 1)),
        ("kv_length", ints(33, 2)),
        ("kv_length", ints(20, -2)),
        ("page_table", ints(3, 1)),
        ("page_table", torch.tensor([[3, 1], [0, 99]])),
        ("page_table", ints([3, 4], [0, 99])),
        ("page_table", ints([3, -1], [0, 99])),
        ("scale", float("nan")),
        ("window", -1),
    ],
)
def test_refuses_wrong_arguments_by_name(name, value):
    assert plugins.paged_attention(**arguments()).shape == (3, 4, 64)
    with pytest.raises(RuntimeError, match=rf"paged_attention: {name} "):
        plugins.paged_attention(**(arguments() | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k_scales", None),
        ("v_scales", None),
        ("k_scales", torch.zeros(4, 16)),
        ("k_scales", torch.zeros(4, 2, 16)),
        ("v_scales", torch.zeros(3, 16, 2)),
        ("v_scales", torch.zeros(4, 16, 2).bfloat16()),
        ("k_scale", 0.5),
        ("v_scale", 2.0),
        ("page_table", ints([3, 4], [0, 99])),
    ],
)
def test_refuses_wrong_scales_by_name(name, value):
    pools = {key: torch.zeros(4, 16, 2, 64, dtype=torch.int8) for key in ("k_pool", "v_pool")}
    good = arguments() | pools | {key: torch.ones(4, 16, 2) for key in ("k_scales", "v_scales")}
    assert plugins.paged_attention(**good).shape == (3, 4, 64)
    with pytest.raises(RuntimeError, match=rf"paged_attention: {name} "):
        plugins.paged_attention(**(good | {name: value}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_refuses_rotated_keys_but_in_int8_with_scales(dtype):
    pool = torch.zeros(4, 16, 2, 64, dtype=dtype)
    with pytest.raises(RuntimeError, match="paged_attention: rotates_keys is for a k_pool of int8 with k_scales"):
        plugins.paged_attention(**(arguments() | {"k_pool": pool, "v_pool": pool}), rotates_keys=True)


def test_refuses_scales_of_float_pools():
    scales = {key: torch.ones(4, 16, 2) for key in ("k_scales", "v_scales")}
    with pytest.raises(RuntimeError, match="paged_attention: k_scales are for 8-bit pools"):
        plugins.paged_attention(**(arguments() | scales))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k_scales", None),
        ("v_pool", torch.zeros(4, 16, 2, 64, dtype=torch.uint8)),
        ("v_pool", torch.zeros(4, 16, 2, 32, dtype=torch.int8)),
        ("v_pool", torch.zeros(4, 16, 2, 64).to(E4M3)),
        ("q", torch.randn(3, 4, 32)),
        ("k_scale", 0.5),
    ],
)
def test_refuses_wrong_4_bit_pools_by_name(name, value):
    pools = {key: torch.zeros(4, 16, 2, 32, dtype=INT4) for key in ("k_pool", "v_pool")}
    good = arguments() | pools | {key: torch.ones(4, 16, 2) for key in ("k_scales", "v_scales")}
    assert plugins.paged_attention(**good).shape == (3, 4, 64)
    both = {"v_scales": None} if value is None else {}
    with pytest.raises(RuntimeError, match=rf"paged_attention: {name} "):
        plugins.paged_attention(**(good | {name: value} | both))


def test_refuses_int4_beside_int8_without_scales_of_rows():
    """The pool that needs them may be either of the two."""
    pools = (torch.zeros(4, 16, 2, 64, dtype=torch.int8), torch.zeros(4, 16, 2, 32, dtype=INT4))
    for k_pool, v_pool in (pools, pools[::-1]):
        with pytest.raises(RuntimeError, match="paged_attention: k_scales must be given for pools of uint8"):
            plugins.paged_attention(**(arguments() | {"k_pool": k_pool, "v_pool": v_pool}))


def test_a_nan_query_is_not_hidden(isas, monkeypatch):
    for dtype in DTYPES:
        for queries in (1, 40):
            q = torch.randn(queries, 4, 64).to(dtype)
            q[-1, 2] = float("nan")
            pool = torch.randn(4, 16, 2, 64).to(dtype)
            table, length = ints([0, 1, 2, 3]), ints(64)
            for isa in isas:
                monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                out = plugins.paged_attention(q, pool, pool, ints(0, queries), length, table, 0.1)
                assert out[-1, 2].isnan().all(), (dtype, queries, isa)
                out[-1, 2] = 0
                assert out.isfinite().all(), (dtype, queries, isa)


def test_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("KVFORGE_CPU_ISA", "sse9")
    with pytest.raises(
        RuntimeError, match=r"KVFORGE_CPU_ISA must be one of portable, avx2, avx512, .*, amx_software, amx, not 'sse9'"
    ):
        plugins.paged_attention(**arguments())


def test_opcheck():
    for cache in (*ALL_FORMATS, *MIXED_FORMATS):
        # opcheck cannot clone an empty argument, nor a view that begins inside its storage.
        cases = (paged_attention_case(seed, formats=(cache,)) for seed in range(60))
        case = next(case for case in cases if case[0].numel() and case[0].is_contiguous())
        # test_schema compares copies of arguments by arithmetic that torch does not have for e4m3.
        checks = [check for check in ALL_TEST_UTILS if case[1].dtype != E4M3 or check != "test_schema"]
        torch.library.opcheck(torch.ops.kvforge.paged_attention.default, case, test_utils=checks)
