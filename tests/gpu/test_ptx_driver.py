"""The kernels' PTX started through the CUDA driver, with the arguments in TensorRT's order, against the definitions."""

import importlib

import pytest
import torch

import plugins
from tests.support.cuda_driver import DriverRunner
from tests.support.gpu_cases import check

NUM_CASES, NUM_FULL_CASES = 8, 60
KERNELS = {
    "rope_paged_kv_write": {"rope_paged_kv_write"},
    "paged_attention": {"paged_attention_partial", "paged_attention_combine"},
    "low_rank_key_reconstruct": {"low_rank_key_reconstruct"},
    "speculative_verify": {"speculative_verify"},
    "landmark_select": {"landmark_select_scores", "landmark_select_choose"},
    "chunk_cache_update": {"chunk_cache_update"},
    "selected_kv_write": {"selected_kv_write"},
}


@pytest.mark.parametrize("name", plugins.OPERATORS)
def test_ptx_equals_the_reference(
    name: str, gpu: torch.device, capability: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"plugins.{name}.cuda")
    runner = DriverRunner(capability)
    monkeypatch.setattr(module, "run_kernel", runner)
    torch.zeros(1, device=gpu)  # torch makes the context that the driver calls use
    errors = {seed: check(name, seed, gpu, module.launch) for seed in range(NUM_FULL_CASES if full else NUM_CASES)}
    assert {seed: error for seed, error in errors.items() if error} == {}
    assert set(runner.kernels) == KERNELS[name]
