"""The names of dtypes in options and manifests, and what they are in torch."""

import torch

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Weights, activations and arithmetic."""

KV_DTYPES = {
    **COMPUTE_DTYPES,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8_static": torch.float8_e4m3fn,
    "int8_static": torch.int8,
}
"""Elements of the K,V pools, two numbers each of int4; ``kvforge.common.number_formats.KV_FORMATS`` says which have
scales and where."""
