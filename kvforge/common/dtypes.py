"""The names of dtypes in options and manifests, and what they are in torch."""

from collections.abc import Iterable

import torch

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Weights, activations and arithmetic."""


def torch_specs(specs: Iterable[tuple[tuple[int, ...], str]]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of tensors, by torch's names of the dtypes."""
    return [(shape, getattr(torch, name)) for shape, name in specs]
