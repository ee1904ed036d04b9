"""The kernels' PTX started through the CUDA driver, with the arguments in TensorRT's order, against the definitions."""

import pytest
import torch

from plugins.cuda_driver import DriverRunner
from plugins.registry import backend_modules, modules
from tests.support.operators.cases import check_on

NUM_CASES, NUM_FULL_CASES = 8, 60
MODULES, CUDA_CASES = backend_modules("triton"), dict(modules("cuda_cases"))


@pytest.mark.parametrize("name", MODULES)
def test_ptx_equals_the_reference(
    name: str, gpu: torch.device, capability: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MODULES[name]
    runner = DriverRunner(capability)
    monkeypatch.setattr(module, "run_kernel", runner)
    torch.zeros(1, device=gpu)  # torch makes the context that the driver calls use
    errors = {seed: check_on(gpu, name, seed, module.launch) for seed in range(NUM_FULL_CASES if full else NUM_CASES)}
    assert {seed: error for seed, error in errors.items() if error} == {}
    assert set(runner.kernels) == {spec.name for spec in CUDA_CASES[name].kernel_specs(capability, full=False)}
