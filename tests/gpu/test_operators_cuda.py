"""The operators on the GPU against their definitions, on the shared random cases."""

import pytest
import torch

import plugins
from plugins.registry import backend_modules
from tests.support.operators.cases import check_on

NUM_CASES, NUM_FULL_CASES = 24, 400  # nearly every case is a specialisation of its own to compile


@pytest.mark.parametrize("name", backend_modules("triton"))
def test_equals_the_reference(name: str, gpu: torch.device, full: bool) -> None:
    """fp32, fp16 and bf16; float, e4m3 and int8 caches, static and dynamic scales."""
    operator = getattr(torch.ops.kvforge, name)
    errors = {seed: check_on(gpu, name, seed, operator) for seed in range(NUM_FULL_CASES if full else NUM_CASES)}
    assert {seed: error for seed, error in errors.items() if error} == {}


def test_attention_of_a_sequence_does_not_depend_on_its_batch(gpu: torch.device) -> None:
    """Bit for bit, prefill and decode."""
    torch.manual_seed(0)
    page_size, kv_heads, head_dim, heads = 32, 2, 128, 8
    lengths, queries = [700, 1, 90, 2000], [1, 1, 90, 17]
    pages = [-(-length // page_size) for length in lengths]
    table = torch.randperm(sum(pages), device=gpu).int()
    rows = [torch.nn.functional.pad(part, (0, max(pages) - len(part))) for part in table.split(pages)]
    k_pool, v_pool = torch.randn(2, sum(pages), page_size, kv_heads, head_dim, device=gpu, dtype=torch.bfloat16)
    q = torch.randn(sum(queries), heads, head_dim, device=gpu, dtype=torch.bfloat16)
    starts = torch.tensor([0, *queries], device=gpu).cumsum(0).int()
    kv_length = torch.tensor(lengths, device=gpu).int()
    whole = plugins.paged_attention(q, k_pool, v_pool, starts, kv_length, torch.stack(rows), head_dim**-0.5)
    for s, n in enumerate(queries):
        part = slice(int(starts[s]), int(starts[s + 1]))
        alone = torch.tensor([0, n], device=gpu).int()
        one = plugins.paged_attention(
            q[part], k_pool, v_pool, alone, kv_length[s : s + 1], rows[s][None], head_dim**-0.5
        )
        assert torch.equal(one, whole[part]), s
