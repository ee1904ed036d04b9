"""The least time that a phase can take on this machine: its FLOPs and bytes over measured rates.

    python -m perf.engine.floors

Prefill is bound by FLOPs (matrix products of the weights and causal attention), a decode step by FLOPs or by the bytes
it reads: all weights once, and the caches and states of its sequences once, however many layers share an owner's. A
floor of bytes supposes that nothing stays in the processor's caches from one step to the next.
"""

from dataclasses import asdict, astuple, dataclass

import torch
from torch import Tensor

from kvforge.common.errors import KvforgeError
from kvforge.common.number_formats import QUANTIZED_WEIGHT_BYTES
from kvforge.costs.flops import full_token, full_token_below, skipped_token
from kvforge.costs.weights import step_weight_bytes
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.huge_pages import huge_page_memory
from model_defs import ModelConfig
from perf.harness.command import make_parser
from perf.harness.machine import third_level_bytes
from perf.harness.rates import best_seconds, gemm_rate
from perf.peers.phases import PhaseTimes


@dataclass(frozen=True)
class Rates:
    """Best of several: FLOP/s of large square matrix products, bytes/s read (from large pages), and read plus written
    by a copy. ``bf16_gemm`` and ``int8_gemm`` are float32's rate where that is higher: a CPU without products of
    bfloat16 has these, and of bytes torch has no fast products there, so that int8 work can take less than its floor.
    """

    bf16_gemm: float
    int8_gemm: float
    read: float
    copy: float


def best_rates(*measured: Rates) -> Rates:
    """Return the best of each: a floor is not to be above what the machine can do, which varies."""
    return Rates(*(max(values) for values in zip(*map(astuple, measured), strict=True)))


@dataclass(frozen=True)
class Work:
    """FLOPs of products with weights and of attention, and bytes read from memory; ``weight_dtype`` says at which rate
    the former go."""

    linear_flops: float
    attention_flops: float
    num_bytes: float
    weight_dtype: str

    def floor_s(self, rates: Rates) -> float:
        """Return the seconds below which this cannot be done."""
        linear_rate = rates.int8_gemm if self.weight_dtype in QUANTIZED_WEIGHT_BYTES else rates.bf16_gemm
        flops_s = self.linear_flops / linear_rate + self.attention_flops / rates.bf16_gemm
        return max(flops_s, self.num_bytes / rates.read)


def prefill_work(manifest: Manifest, requests: int, input_tokens: int, times: PhaseTimes) -> Work:
    """Return the work of the prompts, their first output tokens, and the decode tokens that rode along in
    ``times``; bytes are not counted."""
    shape = _shape(manifest)
    skipped = skipped_token(shape, input_tokens)
    full, below = full_token(shape, input_tokens), full_token_below(shape, input_tokens)
    linear = (skipped.total - skipped.attention) * input_tokens
    linear += (full.total - full.attention) - (below.total - below.attention)
    attention = skipped.attention * input_tokens + full.attention - below.attention
    mixed = _decode_flops(shape, times.mixed_rows, times.mixed_context)
    return Work(requests * linear + mixed[0], requests * attention + mixed[1], 0.0, manifest.weight_dtype)


def decode_work(manifest: Manifest, times: PhaseTimes) -> Work:
    """Return the work of the steps of ``times`` without prompt tokens. Of a mixture of experts, a step reads those that
    as many tokens as its steps have on average go to, if they go to each as often."""
    per_step = round(times.decode_rows / max(times.decode_steps, 1))
    weight_bytes = step_weight_bytes(manifest.model, manifest.weight_dtype, per_step)
    num_bytes = times.decode_steps * weight_bytes + times.decode_context * manifest.kv_bytes_per_token
    num_bytes += times.decode_rows * manifest.state_bytes
    flops = _decode_flops(_shape(manifest), times.decode_rows, times.decode_context)
    return Work(*flops, num_bytes, manifest.weight_dtype)


def _shape(manifest: Manifest) -> ModelConfig:
    if any(manifest.model.layer_windows):
        raise KvforgeError("floors are for models without sliding windows; measure another model.")
    return manifest.model


def _decode_flops(shape: ModelConfig, rows: int, context: int) -> tuple[float, float]:
    """FLOPs (linear, attention) of ``rows`` tokens through all layers that attend ``context`` keys in sum; layers that
    read a state count among the linear ones, as they do the same for each token."""
    without_keys = full_token(shape, 0)
    return rows * without_keys.total, context * (full_token(shape, 1).attention - without_keys.attention)


def measure_rates(size: int = 2048, num_bytes: int | None = None, runs: int = 7) -> Rates:
    """Measure this machine with all of torch's threads; in about a second, and some seconds on a CPU that has no
    products of bfloat16 or int8 of its own. ``num_bytes`` are read: by default 256 MiB, or twice what the third-level
    caches hold, which keep a part of less from run to run and are read faster than memory."""
    if num_bytes is None:
        num_bytes = max(1 << 28, 2 * third_level_bytes())
    source = huge_page_memory(num_bytes).view(torch.int32).fill_(1)  # read up to twice as fast as ordinary memory
    first, second = source.chunk(2)
    wide = gemm_rate(torch.mm, lambda n: torch.randn(2, n, n), size, runs)
    narrow = gemm_rate(torch.mm, lambda n: torch.randn(2, n, n).bfloat16(), size, runs, least=wide / 2)
    return Rates(
        bf16_gemm=max(narrow, wide),
        int8_gemm=max(wide, gemm_rate(torch._int_mm, _random_bytes, size, runs, least=wide / 2)),
        read=num_bytes / best_seconds(lambda: torch.amax(source), runs),
        copy=num_bytes / best_seconds(lambda: first.copy_(second), runs),
    )


def _random_bytes(size: int) -> Tensor:
    return torch.randint(-127, 128, (2, size, size), dtype=torch.int8)


def main() -> None:
    """Print this machine's rates."""
    make_parser(__doc__).parse_args()
    for name, rate in asdict(measure_rates()).items():
        print(f"{name:<10} {rate / 1e9:8.1f} {'GFLOP/s' if name.endswith('gemm') else 'GB/s'}")


if __name__ == "__main__":
    main()
