"""Tests that need an NVIDIA GPU: skipped, visibly, where torch sees none."""

import pytest
import torch

from plugins import cuda_ops


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    """The GPU; the operators run on it."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and torch sees none here")
    cuda_ops.register()
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def capability(gpu: torch.device) -> int:
    """Compute capability of the GPU, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(gpu)
    return 10 * major + minor
