"""Exact costs of an engine, from its manifest alone."""

from kvforge.engine import Manifest


def prefill_flops_per_token(manifest: Manifest, context_length: int) -> float:
    """Return the mean FLOPs of one prompt token that is not sampled from, over a prompt of ``context_length``.

    A multiply-add counts 2. Layers below the cut cost their projections, MLP and causal attention; above it only
    each owner's K and V projection is left (arXiv 2410.03960, section 3.2 and Table 1). The vocabulary is not
    counted: skipped prompt tokens have no logits.
    """
    hidden, q_dim = manifest.hidden_size, manifest.num_heads * manifest.head_dim
    kv_dim = manifest.num_kv_heads * manifest.head_dim
    kv_projection = 2 * hidden * 2 * kv_dim
    rest_of_layer = 2 * 2 * hidden * q_dim + 3 * 2 * hidden * manifest.intermediate_size
    attended = [_mean_keys(context_length, window) for window in manifest.layer_windows[: manifest.cut]]
    attention = sum(2 * 2 * q_dim * keys for keys in attended)
    return manifest.num_owners * kv_projection + manifest.cut * rest_of_layer + attention


def _mean_keys(context_length: int, window: int) -> float:
    """Mean number of keys a causal query sees over positions 0..context_length-1."""
    if not window or window >= context_length:
        return (context_length + 1) / 2
    return (window * (window + 1) / 2 + (context_length - window) * window) / context_length
