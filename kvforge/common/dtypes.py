"""The names of dtypes in options and manifests, and what they are in torch."""

import torch

from kvforge.common.number_formats import KV_FORMATS

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Weights, activations and arithmetic."""


def written_dtypes(kv_dtype: str, dtype: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the pools that a step writes K and V to, where ``kv_dtype`` is a key of ``KV_FORMATS``:
    those of a grouped cache are exact, in the ``dtype`` of the computation."""
    stored = KV_FORMATS[dtype if KV_FORMATS[kv_dtype].is_grouped else kv_dtype]
    return getattr(torch, stored.keys.torch_dtype), getattr(torch, stored.values.torch_dtype)
