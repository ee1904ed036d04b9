"""The names of dtypes in options and manifests, and what they are in torch."""

import torch

from kvforge.common.number_formats import KV_FORMATS

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Weights, activations and arithmetic."""

KV_DTYPES = {
    **COMPUTE_DTYPES,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8_static": torch.float8_e4m3fn,
    "int8_static": torch.int8,
    "kivi2": torch.uint8,
}
"""Elements of the K,V pools, two numbers each of int4, four of kivi2; ``kvforge.common.number_formats.KV_FORMATS`` says
which have scales and where."""


def written_dtype(kv_dtype: str, dtype: str) -> torch.dtype:
    """Return the dtype of the pools that a step writes K and V to: those of a grouped cache are exact, in the ``dtype``
    of the computation."""
    return COMPUTE_DTYPES[dtype] if KV_FORMATS[kv_dtype].is_grouped else KV_DTYPES[kv_dtype]
