"""ShadowKV's parameters, lengths and bytes, by hand."""

import dataclasses

import pytest

from kvforge.common.errors import BuildError
from kvforge.kv_policies import Full, OwnerCache, load, parse, policies
from kvforge.kv_policies.shadowkv import ShadowKV

LLAMA_8B = OwnerCache(num_kv_heads=8, head_dim=128, page_size=32, element_bits=16)
TOKENS = 124928  # 122 * 1024


def test_bytes_of_llama_8b_at_122k() -> None:
    """15612 chunks and 32 tokens of tail: 3904 shadow pages, 77 compact pages."""
    u = 3904 * 32 * 160 * 2
    sv = 160 * 8 * 128 * 2
    landmarks = 3904 * 4 * 8 * (128 * 2 + 1)
    cached = 8 * (256 * 4 + 16)
    compact = 77 * 32 * 2 * 8 * 128 * 2
    assert ShadowKV().compact_length(TOKENS) == (256 + 48) * 8 + 32 == 77 * 32
    assert ShadowKV().device_bytes(LLAMA_8B, TOKENS) == u + sv + landmarks + cached + compact == 82_512_000
    assert ShadowKV().host_tier.host_bytes(LLAMA_8B, TOKENS) == TOKENS * 8 * 128 * 2
    assert Full().device_bytes(LLAMA_8B, TOKENS) == TOKENS * 2 * 8 * 128 * 2
    assert Full().device_bytes(LLAMA_8B, TOKENS) >= 6 * ShadowKV().device_bytes(LLAMA_8B, TOKENS)
    assert 32 * Full().device_bytes(LLAMA_8B, TOKENS) == 15.25 * 2**30
    assert ShadowKV().prefill_bytes(LLAMA_8B, TOKENS) == (3904 - 77) * 32 * 4096


def test_generated_tokens_take_pages() -> None:
    policy, page_bytes = ShadowKV(), 32 * LLAMA_8B.token_bytes
    base = policy.device_bytes(LLAMA_8B, TOKENS)
    assert [policy.device_bytes(LLAMA_8B, TOKENS, n) - base for n in (0, 1, 32, 33)] == [
        0, page_bytes, page_bytes, 2 * page_bytes
    ]  # fmt: skip
    assert policy.host_tier.host_bytes(LLAMA_8B, TOKENS, 33) == policy.host_tier.host_bytes(LLAMA_8B, TOKENS)
    assert Full().device_bytes(LLAMA_8B, 31, 2) == 2 * page_bytes


def test_lengths_around_what_is_factored() -> None:
    policy = ShadowKV(rank=4, chunk_size=4, sparse_budget=8, num_outlier_chunks=1, num_local_tokens=3)
    rows = []
    for tokens in (1, 3, 6, 7, 11, 15, 18, 19, 20, 22, 23):
        rows.append((tokens, policy.num_chunks(tokens), policy.num_selected(tokens), policy.tail_length(tokens)))
        assert policy.num_chunks(tokens) * 4 + policy.tail_length(tokens) == tokens
        assert policy.is_factored(tokens) == (tokens >= 19)
        assert policy.compact_length(tokens) == (tokens if tokens < 19 else (2 + 1) * 4 + policy.tail_length(tokens))
        assert policy.keeping.num_state_pages(tokens, 8) == (0 if tokens < 19 else 3)
    assert rows == [
        (1, 0, 0, 1), (3, 0, 0, 3), (6, 0, 0, 6), (7, 1, 0, 3), (11, 2, 1, 3), (15, 3, 2, 3), (18, 3, 2, 6),
        (19, 4, 2, 3), (20, 4, 2, 4), (22, 4, 2, 6), (23, 5, 2, 3),
    ]  # fmt: skip


def test_short_prompts_cost_what_they_cost_without_the_policy() -> None:
    for tokens in (1, 32, 2463, 2471):
        assert not ShadowKV().is_factored(tokens)
        assert ShadowKV().device_bytes(LLAMA_8B, tokens, 5) == Full().device_bytes(LLAMA_8B, tokens, 5)
        assert ShadowKV().device_bytes_read(LLAMA_8B, tokens, 5) == Full().device_bytes_read(LLAMA_8B, tokens, 5)
        assert ShadowKV().prefill_bytes(LLAMA_8B, tokens) == Full().prefill_bytes(LLAMA_8B, tokens) == 0
        assert (
            ShadowKV().host_tier.host_bytes(LLAMA_8B, tokens)
            == ShadowKV().host_tier.host_bytes_read(LLAMA_8B, tokens)
            == 0
        )
    assert ShadowKV().is_factored(2472)


def test_bytes_read_by_a_step() -> None:
    landmarks, sv = 15612 * 8 * 257, 160 * 8 * 128 * 2
    u, compact = 2048 * 8 * 160 * 2, (2464 + 100) * 2 * 8 * 128 * 2
    assert ShadowKV().device_bytes_read(LLAMA_8B, TOKENS, 100) == landmarks + sv + u + compact
    assert ShadowKV().host_tier.host_bytes_read(LLAMA_8B, TOKENS, 100) == 2048 * 8 * 128 * 2
    assert Full().device_bytes_read(LLAMA_8B, TOKENS, 100) == (TOKENS + 100) * 4096


def test_scales_are_counted() -> None:
    assert OwnerCache(2, 64, 16, 8, 4).token_bytes == 2 * 2 * (64 + 4)
    assert OwnerCache(2, 64, 16, 4, 4).token_bytes == 2 * 2 * (32 + 4)


@pytest.mark.parametrize("policy", [Full(), ShadowKV(), ShadowKV(rank=7, num_outlier_chunks=0)])
def test_a_policy_survives_its_names(policy) -> None:
    assert load(policy.name, policy.parameters) == parse(str(policy)) == policy
    assert policies()[policy.name] is type(policy)


def test_text_leaves_defaults() -> None:
    assert parse("shadowkv") == load("shadowkv") == ShadowKV()
    assert parse("shadowkv:rank=64,sparse_budget=1024") == ShadowKV(rank=64, sparse_budget=1024)
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse("full").rank = 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the KV policy '' is unknown; choose from adakv, batchmax, expected, fastgen, full, h2o, "),
        ("snapvk", "streaming, tova; did you mean snapkv?"),
        ("shadow", "the KV policy 'shadow' is unknown; choose from adakv, batchmax, expected, fastgen, full, h2o, "),
        ("full:rank=1", "the KV policy full has no parameter 'rank'; it has none."),
        (
            "shadowkv:ranks=1",
            "the KV policy shadowkv has no parameter 'ranks'; it has rank, chunk_size, sparse_budget, "
            "num_outlier_chunks, num_local_tokens.",
        ),
        ("shadowkv:", "the KV policy 'shadowkv:' is not a name and whole numbers; write NAME or NAME:PARAMETER=N"),
        ("snapkv:budget=abc", "PARAMETER=N, such as snapkv:budget=512,block=1,window=32,kernel=5."),
        ("keydiff+adakv:budget", "such as keydiff+adakv:budget=512,block=64,floor_percent=20."),
        ("full:", "is not a name and whole numbers; write NAME or NAME:PARAMETER=N,PARAMETER=N, such as full."),
        ("h3o:budget=abc", "the KV policy 'h3o' is unknown"),
        ("shadowkv:rank", "is not a name and whole numbers"),
        ("shadowkv:rank=", "is not a name and whole numbers"),
        ("shadowkv:rank=-1", "is not a name and whole numbers"),
        ("shadowkv:rank=1.5", "is not a name and whole numbers"),
        ("shadowkv:rank=²", "is not a name and whole numbers"),
        ("shadowkv:rank=" + "9" * 5000, "is not a name and whole numbers"),
        ("shadowkv:rank=1,rank=2", "gives 'rank' twice; keep one of them."),
        ("shadowkv:a\nb=1,a\nb=1", r"gives 'a\nb' twice"),
        ("shadowkv\n", r"the KV policy 'shadowkv\n' is unknown"),
        ("shadowkv:rank=0", "shadowkv: rank is 0; give at least 1."),
        ("shadowkv:chunk_size=0", "shadowkv: chunk_size is 0; give at least 1."),
        ("shadowkv:sparse_budget=0", "shadowkv: sparse_budget is 0; give at least 1."),
        ("shadowkv:num_local_tokens=2000000", "shadowkv: num_local_tokens is 2000000; give at most 1048576."),
        ("shadowkv:sparse_budget=12", "shadowkv: sparse_budget 12 is no multiple of chunk_size 8; give whole chunks."),
    ],
)  # fmt: skip
def test_refusals(text, message) -> None:
    with pytest.raises(BuildError) as error:
        parse(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_the_model_must_have() -> None:
    ShadowKV(rank=16).check(num_kv_heads=2, head_dim=8, page_size=16)
    with pytest.raises(BuildError, match="rank 17 exceeds the 16 dimensions of a token's keys; give at most 16"):
        ShadowKV(rank=17).check(num_kv_heads=2, head_dim=8, page_size=16)
    with pytest.raises(BuildError, match="--page-size 12 is no multiple of shadowkv's chunk_size 8"):
        ShadowKV(rank=16).check(num_kv_heads=2, head_dim=8, page_size=12)
