"""What a step must at least compute and read, from an engine's manifest: the floors beside measured times."""

from kvforge.costs import cache
from kvforge.costs import flops as costs
from kvforge.manifest import Manifest
from kvforge.planning.capacity import normalized_tflops

__all__ = ["decode_flops", "kv_read_bytes", "normalized_tflops", "prompt_flops"]


def prompt_flops(manifest: Manifest, input_tokens: int) -> float:
    """Return the FLOPs of one prompt and its first token."""
    return costs.prompt_flops(manifest.model, input_tokens)


def decode_flops(manifest: Manifest, context: int) -> float:
    """Return the FLOPs of one decode token that attends ``context`` keys: all layers and the vocabulary."""
    return costs.full_token(manifest.model, context).total


def kv_read_bytes(manifest: Manifest, context: int) -> float:
    """Return the bytes of cache that one decode token reads: every layer reads its owner's, scales included."""
    return cache.kv_read_bytes(manifest.model, manifest.kv_dtype, context)
