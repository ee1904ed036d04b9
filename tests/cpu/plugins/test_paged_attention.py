"""PagedAttention on CPU against its reference, its invariances, and what it refuses."""

import pytest
import torch

import plugins
from plugins.random_cases import paged_attention_case

REFERENCE = plugins.OPERATORS["paged_attention"].reference
NUM_CASES, NUM_BLOCKS = 320, 8
DTYPES = (torch.float32, torch.bfloat16)


def tolerance(q: torch.Tensor) -> float:
    """Largest error, relative to the largest element of the result."""
    return 4e-6 if q.dtype == torch.float32 else 1e-2


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_agrees_with_the_reference(block, isas, monkeypatch):
    for seed in range(block, NUM_CASES, NUM_BLOCKS):
        args = paged_attention_case(seed)
        want = REFERENCE(*args)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            got = plugins.paged_attention(*args)
            assert got.shape == want.shape and got.dtype == want.dtype and got.is_contiguous()
            if got.numel():
                assert got.isfinite().all(), (seed, isa)
                assert relative_error(got, want) < tolerance(args[0]), (seed, isa)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 700])
def test_long_keys_are_split_and_merged(dtype, window, isas, monkeypatch):
    """Several splits in both kinds of work: one query, and a short chunk after a long past."""
    torch.manual_seed(0)
    page_size, kv_heads, head_dim = 32, 2, 64
    pool = torch.randn(2, 160, page_size, kv_heads, head_dim).to(dtype)
    page_table = torch.randperm(160).view(2, 80).int()
    lengths = torch.tensor([2500, 2431]).int()
    query_start = torch.tensor([0, 1, 61]).int()
    q = torch.randn(61, 2 * kv_heads, head_dim).to(dtype)
    args = (q, pool[0], pool[1], query_start, lengths, page_table, 0.25, window)
    want = REFERENCE(*args)
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        assert relative_error(plugins.paged_attention(*args), want) < tolerance(q), isa


def one_sequence(args: tuple, s: int) -> tuple:
    q, k_pool, v_pool, query_start, kv_length, page_table, scale, window = args
    begin, end = query_start[s : s + 2].tolist()
    start = torch.tensor([0, end - begin], dtype=torch.int32)
    return q[begin:end], k_pool, v_pool, start, kv_length[s : s + 1], page_table[s : s + 1], scale, window


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_does_not_depend_on_its_neighbours(dtype, isas, monkeypatch):
    for seed in range(40):
        args = paged_attention_case(seed, q_dtype=dtype, pool_dtype=dtype)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            together = plugins.paged_attention(*args)
            starts = args[3].tolist()
            for s in range(len(starts) - 1):
                alone = plugins.paged_attention(*one_sequence(args, s))
                assert torch.equal(alone, together[starts[s] : starts[s + 1]]), (seed, isa, s)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype):
    threads = torch.get_num_threads()
    try:
        for seed in range(30):
            args = paged_attention_case(seed, q_dtype=dtype, pool_dtype=dtype)
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(plugins.paged_attention(*args))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]), seed
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_physical_pages_and_page_size_change_no_bit(dtype, isas, monkeypatch):
    torch.manual_seed(1)
    length, kv_heads, head_dim, window = 600, 2, 80, 0
    keys = torch.randn(2, length, kv_heads, head_dim).to(dtype)
    for queries in (1, 3, 200):
        q = torch.randn(queries, 6, head_dim).to(dtype)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            results = []
            for page_size in (1, 16, 16, 100):
                pages = -(-length // page_size)
                pool = torch.full((2, pages + 3, page_size, kv_heads, head_dim), float("nan")).to(dtype)
                page_table = torch.randperm(pages + 3)[:pages].int()
                key = torch.arange(length)
                pool[:, page_table[key // page_size].long(), key % page_size] = keys
                start, kv_length = torch.tensor([0, queries]).int(), torch.tensor([length]).int()
                results.append(
                    plugins.paged_attention(q, pool[0], pool[1], start, kv_length, page_table[None], 0.1, window)
                )
            assert all(torch.equal(results[0], result) for result in results[1:]), (queries, isa)


@pytest.mark.parametrize("window", [0, 50])
def test_in_float32_chunks_change_only_rounding(window, isas, monkeypatch):
    torch.manual_seed(2)
    length, page_size, head_dim = 500, 16, 64
    pool = torch.randn(2, 40, page_size, 2, head_dim)
    page_table = torch.randperm(40)[None].int()
    q = torch.randn(length, 6, head_dim)

    def run(chunk: int) -> torch.Tensor:
        parts = []
        for begin in range(0, length, chunk):
            end = min(length, begin + chunk)
            start, kv_length = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
            parts.append(
                plugins.paged_attention(q[begin:end], pool[0], pool[1], start, kv_length, page_table, 0.125, window)
            )
        return torch.cat(parts)

    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        whole = run(length)
        for chunk in (1, 7, 64):
            assert relative_error(run(chunk), whole) < 2e-6, (isa, chunk)
        # Above 16 rows per KV head (here 6 queries), chunking changes no bit.
        assert torch.equal(run(125), run(250)) and torch.equal(run(250), whole), isa


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
    with pytest.raises(RuntimeError, match="KVFORGE_CPU_ISA must be portable, avx2 or avx512, not 'sse9'"):
        plugins.paged_attention(**arguments())


def test_opcheck():
    for seed in (0, 5):
        torch.library.opcheck(torch.ops.kvforge.paged_attention.default, paged_attention_case(seed))
