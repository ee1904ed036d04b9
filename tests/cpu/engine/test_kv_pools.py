"""Bytes and places of the K,V pools, for every cache format."""

import pytest
import torch

from kvforge.common.number_formats import KV_FORMATS, written_formats
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.huge_pages import ALIGNMENT
from kvforge.runtime.sessions.pools import allocate_pools
from model_defs.kv_layout import owner_table
from plugins.kv_quantization import LARGEST, dequantize, dynamic_scale, quantize, stored_dim
from tests.support.rounding import gamma
from tests.support.sessions.fake import fake_manifest


def llama_8b(kv_dtype: str, cut: int = 32, group_size: int = 1) -> Manifest:
    """The cache dimensions of Llama 3.1 8B."""
    owners = owner_table(32, cut, group_size)
    scales = ((0.1, 0.2),) * len(set(owners)) if KV_FORMATS[kv_dtype].scales == "static" else ()
    return fake_manifest(
        num_layers=32,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        cut=cut,
        group_size=group_size,
        page_size=32 if KV_FORMATS[kv_dtype].is_grouped else 16,
        kv_dtype=kv_dtype,
        kv_scales=scales,
    )


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_the_layout_and_the_kernels_store_a_head_alike(kv_dtype: str) -> None:
    for one in written_formats(kv_dtype, "bfloat16"):
        assert one.stored_dim(128) == stored_dim(128, getattr(torch, one.torch_dtype))


def allocated(manifest: Manifest, num_pages: int) -> tuple[int, int]:
    """Bytes of (elements, scales) in freshly allocated pools."""
    pools = allocate_pools(manifest, num_pages)
    return (
        sum(tensor.nbytes for pool in pools for tensor in pool[:2]),
        sum(tensor.nbytes for pool in pools for tensor in pool[2:]),
    )


@pytest.mark.parametrize(
    ("group_size", "kv_dtype", "reduction"),
    [(1, "bfloat16", 0.0), (2, "bfloat16", 0.25), (4, "bfloat16", 0.375), (2, "fp8", 0.625), (4, "fp8", 0.6875)],
)
def test_reductions_of_table_7_as_allocated_bytes(group_size: int, kv_dtype: str, reduction: float) -> None:
    """arXiv 2410.03960, Table 7: Llama 8B cut at 16, AcrossKV and FP8 against a bf16 cache of every layer. The paper
    counts elements; the scale per token and head adds 4 bytes to 128."""
    base, _ = allocated(llama_8b("bfloat16"), 3)
    elements, scales = allocated(llama_8b(kv_dtype, 16, group_size), 3)
    assert 1 - elements / base == reduction
    assert scales == (elements / 128 * 4 if kv_dtype == "fp8" else 0)
    static, none = allocated(llama_8b(f"{kv_dtype}_static" if kv_dtype == "fp8" else kv_dtype, 16, group_size), 3)
    assert (static, none) == (elements, 0)


def test_cut_groups_of_4_and_4_bits_are_a_sixth_of_the_bytes() -> None:
    """Llama-3.1-8B: 131,072 bytes a token in bf16; cut at 16, 4-way AcrossKV and int4 21,760, a sixth of them, scales
    included: what the plan says is what is allocated."""
    plain, small = llama_8b("bfloat16"), llama_8b("int4", 16, 4)
    assert (plain.kv_bytes_per_token, small.kv_bytes_per_token) == (131_072, 21_760)
    for manifest in (plain, small):
        assert sum(allocated(manifest, 3)) == 3 * manifest.page_size * manifest.kv_bytes_per_token
    assert allocated(small, 3) == (3 * 16 * 20_480, 3 * 16 * 1_280)
    assert allocate_pools(small, 3)[0][0].shape == (3, 16, 8, 64)


def test_keys_and_values_of_two_formats_have_pools_of_their_own() -> None:
    """Llama-3.1-8B: 8 heads of 128 numbers, in 128 bytes of K and 64 of V, and two scales of 4 bytes."""
    manifest = llama_8b("k8v4")
    assert manifest.kv_bytes_per_token == 32 * 8 * (128 + 64 + 2 * 4) == 32 * manifest.owner_cache.token_bytes
    pools = allocate_pools(manifest, 3)[0]
    assert [(tensor.dtype, tensor.shape[-1]) for tensor in pools[:2]] == [(torch.int8, 128), (torch.uint8, 64)]


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_pool_bytes_are_the_formulas(kv_dtype: str) -> None:
    manifest = llama_8b(kv_dtype, 16, 4)
    elements, rest = allocated(manifest, 5)
    page_elements = manifest.page_size * manifest.kv_element_bytes_per_token
    page_scales = manifest.page_size * manifest.kv_scale_bytes_per_token
    if manifest.kv_format.is_grouped:
        assert (elements, rest) == (manifest.exact_bytes, 5 * (page_elements + page_scales))
    else:
        assert (elements, rest) == (5 * page_elements, 5 * page_scales) and manifest.exact_bytes == 0
    assert elements + rest == 5 * manifest.page_bytes + manifest.exact_bytes
    storage = allocate_pools(manifest, 5)[0][0].untyped_storage()
    assert storage.nbytes() == elements + rest, "sizes that the alignment divides leave no gap"


@pytest.mark.parametrize("kv_dtype", [name for name, one in KV_FORMATS.items() if not one.is_grouped])
def test_awkward_pools_are_aligned_and_do_not_overlap(kv_dtype: str) -> None:
    """3 heads of 10 in pages of 7: no size is a multiple of anything."""
    scales = ((1.0, 1.0),) * 2 if KV_FORMATS[kv_dtype].scales == "static" else ()
    manifest = fake_manifest(num_heads=3, num_kv_heads=3, head_dim=10, page_size=7, kv_dtype=kv_dtype, kv_scales=scales)
    pools = allocate_pools(manifest, 3)
    dynamic = KV_FORMATS[kv_dtype].scales == "dynamic"
    assert [len(pool) for pool in pools] == [4 if dynamic else 2] * 2
    tensors = [tensor for pool in pools for tensor in pool]
    assert all(tensor.is_contiguous() for tensor in tensors)
    storage = tensors[0].untyped_storage()
    offsets = [tensor.data_ptr() - storage.data_ptr() for tensor in tensors]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert 0 <= storage.nbytes() - 3 * manifest.page_bytes < ALIGNMENT * len(tensors)
    for index, tensor in enumerate(tensors):
        assert not tensor.view(torch.uint8).any()
        tensor.view(torch.uint8).fill_(index + 1)
    for index, tensor in enumerate(tensors):
        assert (tensor.view(torch.uint8) == index + 1).all()
    if dynamic:
        assert [tuple(scale.shape) for scale in pools[0][2:]] == [(3, 7, 3)] * 2
        assert pools[0][2].dtype == torch.float32


@pytest.mark.parametrize("dtype", LARGEST)
def test_round_trip_error_per_element(dtype: torch.dtype) -> None:
    """e4m3 has 3 mantissa bits: half a step is 1/16 of the number, or half of its smallest step, 2**-9 scales.
    Integers: half a scale. Rows of all magnitudes, with outliers, zeros and float32's extremes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 64, generator=generator) * torch.logspace(-30, 30, 4000)[:, None]
    x[::7, 5] *= 1000
    x[::11] = 0
    x[1, :2] = torch.tensor([3e38, 1e-45])
    scale = dynamic_scale(x, dtype)[:, None]
    stored = dequantize(quantize(x, scale, dtype), None).double()
    assert stored.abs().max() == LARGEST[dtype]
    error = (stored * scale.double() - x.double()).abs()
    bound = (
        scale.double() / 2 if dtype != torch.float8_e4m3fn else torch.maximum(x.double().abs() / 16, scale * 2.0**-10)
    )
    assert (error <= bound * (1 + gamma(3))).all()  # the scale, the quotient and its product are rounded
    assert (error[::11] == 0).all()
