"""A plan: every cut, group size and cache format of a model side by side, as JSON-ready data."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.number_formats import ELEMENT_BYTES
from kvforge.costs.cache import (
    exact_bytes,
    kv_bytes,
    kv_element_bytes,
    kv_read_bytes,
    kv_scale_bytes,
    sequence_kv_bytes,
    state_bytes,
)
from kvforge.costs.flops import full_token, skipped_token, table_1
from kvforge.costs.weights import (
    head_weight_bytes,
    num_parameters,
    step_weight_bytes,
    step_weights,
    weight_bits,
    weight_bytes,
)
from kvforge.kv_policies import Full, of_cache
from kvforge.planning.capacity import (
    GIB,
    Machine,
    break_even_tokens,
    cache_tokens,
    distillation_flops_per_token,
    max_speedup,
    memory_for,
    normalized_tflops,
    requests_per_second,
    requests_that_fit,
)
from kvforge.planning.cuts import merged, with_cut, without_cut
from model_defs import ModelConfig
from model_defs.draft_head import DraftHead

DEFAULT_STEP_TOKENS = 2048
"""Those of a build's default ``--max-num-tokens``."""
RATIOS = (1, 2, 5, 10, 20, 50, 100)
"""Input tokens per output token, for the maximum speed-up (arXiv 2410.03960, Figure 2 right)."""


@dataclass(frozen=True)
class PlannedWorkload:
    """Tokens of a request, dtype of the weights, and what distilling costs in tokens; tokens of a page and of a step,
    for caches that have exact pages; the draft head beside each variant; the bits of a weight where some layers are
    int8 beside others in 4 bits."""

    input_tokens: int = 8192
    output_tokens: int = 256
    weight_dtype: str = "bfloat16"
    distillation_tokens: float = 680e6
    page_size: int = 32
    step_tokens: int = DEFAULT_STEP_TOKENS
    head: DraftHead | None = None
    weight_bits: float | None = None

    def weight_bytes(self, model: ModelConfig) -> int:
        """Return the bytes of a model's weights."""
        return weight_bytes(model, self.weight_dtype) + self._int8_bytes(model)

    def bytes_beside(self, model: ModelConfig) -> int:
        """Return the bytes of weights beside those that ``weight_dtype`` says: of int8 layers and a draft head."""
        return self._int8_bytes(model) + self.head_costs(model)["weight_bytes"]

    def _int8_bytes(self, model: ModelConfig) -> int:
        if self.weight_bits is None:
            return 0
        return round(self.weight_bits / 8 * step_weights(model)) - step_weight_bytes(model, self.weight_dtype)

    def head_costs(self, model: ModelConfig) -> dict[str, int]:
        """Return the bytes of the draft head's weights, and of what it keeps of a token; 0 without one."""
        if self.head is None:
            return {"weight_bytes": 0, "kv_bytes_per_token": 0}
        weights = head_weight_bytes(model, self.head, self.weight_dtype)
        return {"weight_bytes": weights, "kv_bytes_per_token": kv_bytes(self.head.model, self.wide_dtype)}

    @property
    def wide_dtype(self) -> str:
        """Dtype of a cache that is not quantized."""
        return "float32" if self.weight_dtype == "float32" else "bfloat16"

    @property
    def exact_bits(self) -> int:
        """Bits of a number in exact pages."""
        return 8 * ELEMENT_BYTES[self.wide_dtype]


@dataclass(frozen=True)
class Fleet:
    """GPUs (or machines) that share one model, each with memory, a FLOP rate and a bandwidth; 0 where unknown."""

    memory_gib: tuple[float, ...] = ()
    reserve_gib: float = 0.25
    tflops: float = 0.0
    bandwidth_gb_s: float = 0.0
    num_gpus: int = 1

    def machine(self, memory_gib: float) -> Machine:
        """Return all of them as one machine."""
        count = self.num_gpus
        return Machine(
            count * memory_gib * GIB,
            count * self.reserve_gib * GIB,
            count * self.tflops * 1e12,
            count * self.bandwidth_gb_s * 1e9,
        )


@dataclass(frozen=True)
class Variant:
    """One row of a plan."""

    name: str
    model: ModelConfig
    group_size: int
    kv_dtype: str


def list_variants(
    model_name: str,
    model: ModelConfig,
    cuts: Sequence[int],
    group_sizes: Sequence[int],
    kv_dtypes: Sequence[str],
    all_pairs: bool,
    anchors: Sequence[int | None] = (None,),
) -> list[Variant]:
    """Return the plain model, each cut with each group size, and all layers merged, for each cache format; of a model
    whose layers keep a state no merged one. ``anchors`` are the kinds of each cut as ``with_cut`` takes them.

    Unless ``all_pairs``, the larger groups are shown at the first cut only, and there where layers can share caches so.
    Raises KvforgeError for an impossible cut, or for what cuts may have where there are none.
    """
    if not cuts and (all_pairs or any(kind is not None for kind in anchors)):
        raise KvforgeError(
            f"{model_name} is planned without cuts, and --group-size and --cut-kind are for these; leave them out."
        )
    first, found = cuts[:1], [("no cut", without_cut(model), 1)]
    for cut in dict.fromkeys(cuts):
        for size, kind in itertools.product(dict.fromkeys(group_sizes), dict.fromkeys(anchors)):
            try:
                made = with_cut(model, cut, size, name=model_name, num_anchors=kind)
            except KvforgeError:
                if all_pairs or size == min(group_sizes):
                    raise
                continue
            if cut < model.num_layers and (all_pairs or size == min(group_sizes) or cut in first):
                name = f"cut {cut} of {model.num_layers}" + (f", {size}-way" if size > 1 else "")
                found.append((name + (", blind" if made.is_blind else ""), made, size))
    if model.linear is None:
        found.append(("all layers merged", merged(model), model.num_layers))
    suffix = [f", {kv_dtype}" if len(kv_dtypes) > 1 else "" for kv_dtype in kv_dtypes]
    return [
        Variant(name + end, made, size, kv_dtype)
        for kv_dtype, end in zip(kv_dtypes, suffix, strict=True)
        for name, made, size in found
    ]


def make_plan(
    model_name: str,
    model: ModelConfig,
    variants: Sequence[Variant],
    work: PlannedWorkload,
    fleet: Fleet,
    tokens_per_second: float = 0.0,
) -> dict[str, Any]:
    """Return the plan; see docs/planning.md for its fields. The first variant is what capacity is compared with.

    Relative costs and reductions are against the model without a cut and a cache of 16 bits, or 32 with float32
    weights.

    Raises:
        BuildError: a variant's cache format does not go with its heads or the pages.
    """
    for variant in variants:
        made = variant.model
        of_cache(Full(), variant.kv_dtype).check(made.num_kv_heads, made.head_dim, work.page_size)
    base = num_parameters(without_cut(model))
    plan: dict[str, Any] = {
        "model": model_name,
        "num_layers": model.num_layers,
        "num_parameters": base,
        "input_tokens": work.input_tokens,
        "output_tokens": work.output_tokens,
        "weight_dtype": work.weight_dtype,
        "weight_bits": work.weight_bits or weight_bits(model, step_weight_bytes(model, work.weight_dtype)),
        "table_1_context": model.max_position,
        "variants": [_row(model, variant, work, fleet) for variant in variants],
    }
    if work.head is not None:
        plan["draft_head"] = {"kind": work.head.kind, **work.head_costs(model)}
    if fleet.memory_gib:
        plan["capacity"] = [_capacity(variants, work, fleet, memory) for memory in fleet.memory_gib]
    if tokens_per_second:
        rate = normalized_tflops(base, tokens_per_second) / fleet.num_gpus
        plan["throughput"] = {"tokens_per_second": tokens_per_second, "num_gpus": fleet.num_gpus}
        plan["throughput"]["normalized_tflops_per_gpu"] = rate
        if fleet.tflops:
            plan["throughput"]["share_of_tflops"] = rate / fleet.tflops
    return plan


def _row(model: ModelConfig, variant: Variant, work: PlannedWorkload, fleet: Fleet) -> dict[str, Any]:
    made, plain = variant.model, without_cut(model)
    prompt = skipped_token(made, work.input_tokens)
    paper = table_1(made, model.max_position)
    wide = kv_bytes(plain, work.wide_dtype)
    length, middle = work.input_tokens + work.output_tokens, work.input_tokens + work.output_tokens / 2
    kept = sequence_kv_bytes(made, variant.kv_dtype, work.input_tokens, length) / length
    elements = kept * kv_element_bytes(made, variant.kv_dtype) / kv_bytes(made, variant.kv_dtype)
    spent = distillation_flops_per_token(made, work.input_tokens) * work.distillation_tokens
    is_distilled = made.is_swiftkv and made.linear is None
    distillation: dict[str, Any] | None = None
    if is_distilled:
        distillation = {
            "tokens": work.distillation_tokens,
            "flops": spent,
            "break_even_prompt_tokens": break_even_tokens(made, work.input_tokens, work.distillation_tokens),
        }
        if fleet.tflops:
            distillation["gpu_hours"] = spent / (fleet.tflops * 1e12) / 3600
    return {
        "name": variant.name,
        "cut": made.cut,
        "num_anchors": made.num_anchors,
        "group_size": variant.group_size,
        "num_owners": made.num_owners,
        "kv_dtype": variant.kv_dtype,
        "num_parameters": num_parameters(made),
        "weight_bytes": work.weight_bytes(made),
        "prompt_token_flops": prompt.to_json(),
        "output_token_flops": full_token(made, middle, num_prompt_tokens=work.input_tokens).to_json(),
        "relative_prefill": prompt.total / skipped_token(plain, work.input_tokens).total,
        "table_1_gflop": {name: value / 1e9 for name, value in paper.to_json().items()},
        "table_1_relative": paper.total / table_1(plain, model.max_position).total,
        "kv_bytes_per_token": math.ceil(kept),
        "kv_element_bytes_per_token": kv_element_bytes(made, variant.kv_dtype),
        "kv_scale_bytes_per_token": kv_scale_bytes(made, variant.kv_dtype),
        "kv_exact_bytes_per_request": _exact_bytes(variant, work, 1, 0),
        "kv_exact_bytes_per_step": _exact_bytes(variant, work, 0, work.step_tokens),
        "kv_bytes_per_request": round(kept * length),
        "state_bytes_per_request": state_bytes(made, work.wide_dtype),
        "step_kv_bytes_read": kv_read_bytes(made, variant.kv_dtype, middle, work.input_tokens),
        "cache_reduction": 1 - elements / wide,
        "cache_reduction_with_scales": 1 - kept / wide,
        "max_speedup": max_speedup(made, plain, work.input_tokens, work.output_tokens),
        "max_speedup_by_ratio": {
            str(ratio): max_speedup(made, plain, work.input_tokens, max(round(work.input_tokens / ratio), 1))
            for ratio in RATIOS
        },
        "distillation": distillation,
    }


def _exact_bytes(variant: Variant, work: PlannedWorkload, num_requests: int, num_tokens: int) -> int:
    return exact_bytes(variant.model, variant.kv_dtype, work.page_size, work.exact_bits, num_requests, num_tokens)


def _capacity(variants: Sequence[Variant], work: PlannedWorkload, fleet: Fleet, memory_gib: float) -> dict[str, Any]:
    machine, length = fleet.machine(memory_gib), work.input_tokens + work.output_tokens
    rows: list[dict[str, Any]] = []
    for variant in variants:
        head, of_step = work.head_costs(variant.model), _exact_bytes(variant, work, 0, work.step_tokens)
        each = _exact_bytes(variant, work, 1, 0) + length * head["kv_bytes_per_token"]
        each += state_bytes(variant.model, work.wide_dtype)
        kept = machine.reserve_bytes + of_step + work.bytes_beside(variant.model)
        free = dataclasses.replace(machine, reserve_bytes=kept)
        kept_by_one = sequence_kv_bytes(variant.model, variant.kv_dtype, work.input_tokens, length)
        dtypes, prompt = (work.weight_dtype, variant.kv_dtype), work.input_tokens
        requests = requests_that_fit(variant.model, free, *dtypes, length, each, prompt)
        beside = dataclasses.replace(machine, reserve_bytes=kept + requests * _exact_bytes(variant, work, 1, 0))
        tokens = cache_tokens(variant.model, beside, *dtypes)
        if head["kv_bytes_per_token"]:
            own = kv_bytes(variant.model, variant.kv_dtype)
            tokens = int(tokens * own / (own + head["kv_bytes_per_token"]))
        if variant.model.is_blind:  # as those of such requests
            tokens = int(tokens * kv_bytes(variant.model, variant.kv_dtype) * length / kept_by_one)
        row: dict[str, Any] = {"name": variant.name, "cache_tokens": tokens, "requests": requests}
        first = (rows[0] if rows else row)["requests"]
        memory = memory_for(variant.model, 0, kept + first * (each + kept_by_one), *dtypes)
        row["gib_per_gpu_for_as_many_as_first"] = memory / GIB / fleet.num_gpus
        if fleet.tflops:
            rate = requests_per_second(
                variant.model,
                machine,
                row["requests"],
                work.input_tokens,
                work.output_tokens,
                work.weight_dtype,
                variant.kv_dtype,
            )
            row["max_tokens_per_second"] = rate * length
        rows.append(row)
    return {"memory_gib_per_gpu": memory_gib, "variants": rows}
