"""What a step must at least compute and read, from an engine's manifest: the floors beside measured times."""

from kvforge.engine import SCALE_BYTES, Manifest
from kvforge.planner import prefill_flops_per_token


def normalized_tflops(num_parameters: int, tokens_per_second: float) -> float:
    """Return 2 x parameters x combined tokens/s in TFLOP/s (arXiv 2410.03960, section 4.3); ``num_parameters`` is the
    model's without a cut, so that saved work counts."""
    return 2 * num_parameters * tokens_per_second / 1e12


def prompt_flops(manifest: Manifest, input_tokens: int) -> float:
    """Return the FLOPs of one prompt and its first token."""
    prompt = prefill_flops_per_token(manifest, input_tokens) * input_tokens
    below = prefill_flops_per_token(manifest, 1) - _attention(manifest, manifest.cut, 1)
    return prompt + decode_flops(manifest, input_tokens) - below - _attention(manifest, manifest.cut, input_tokens)


def decode_flops(manifest: Manifest, context: int) -> float:
    """Return the FLOPs of one decode token that attends ``context`` keys: all layers and the vocabulary."""
    hidden, q_dim = manifest.hidden_size, manifest.num_heads * manifest.head_dim
    layer = 2 * 2 * hidden * q_dim + 3 * 2 * hidden * manifest.intermediate_size
    kv = 2 * hidden * 2 * manifest.num_kv_heads * manifest.head_dim * manifest.num_owners
    attention = _attention(manifest, manifest.num_layers, context)
    return manifest.num_layers * layer + kv + attention + 2 * hidden * manifest.vocab_size


def kv_read_bytes(manifest: Manifest, context: int) -> int:
    """Return the bytes of cache that one decode token reads: every layer reads its owner's, scales included."""
    per_head = manifest.head_dim * manifest.kv_format.element_bytes
    per_head += SCALE_BYTES if manifest.kv_format.scales == "dynamic" else 0
    keys = sum(min(context, window) if window else context for window in manifest.layer_windows)
    return 2 * manifest.num_kv_heads * per_head * keys


def weight_bytes(manifest: Manifest, element_bytes: int) -> int:
    """Return the bytes of weights that a decode step reads: all but the embedding, of which it gathers rows."""
    return (manifest.num_parameters - manifest.vocab_size * manifest.hidden_size) * element_bytes


def _attention(manifest: Manifest, num_layers: int, context: int) -> int:
    q_dim = manifest.num_heads * manifest.head_dim
    return sum(
        2 * 2 * q_dim * (min(context, window) if window else context) for window in manifest.layer_windows[:num_layers]
    )
