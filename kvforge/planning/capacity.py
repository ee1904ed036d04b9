"""What fits into a memory, and the bounds on throughput that follow."""

from dataclasses import dataclass

from kvforge.costs.cache import kv_bytes, kv_read_bytes, sequence_kv_bytes, state_bytes
from kvforge.costs.flops import (
    full_token,
    full_token_below,
    output_flops,
    prompt_flops,
    request_flops,
    skipped_token,
)
from kvforge.costs.weights import step_weight_bytes, weight_bytes
from kvforge.planning.cuts import without_cut
from model_defs import ModelConfig

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Memory in bytes, what of it is neither weights nor cache, the sustained FLOP/s and bytes/s; 0: unknown."""

    memory_bytes: float
    reserve_bytes: float = 0.0
    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0


def cache_tokens(model: ModelConfig, machine: Machine, weight_dtype: str, kv_dtype: str) -> int:
    """Return the tokens whose cache fits beside the weights; 0 where the weights alone do not fit."""
    return requests_that_fit(model, machine, weight_dtype, kv_dtype, 1)


def requests_that_fit(
    model: ModelConfig,
    machine: Machine,
    weight_dtype: str,
    kv_dtype: str,
    length: int,
    exact_bytes: int = 0,
    num_prompt_tokens: int = 1,
) -> int:
    """Return the requests of ``length`` tokens, ``num_prompt_tokens`` of them a prompt's, whose cache fits beside the
    weights; each has ``exact_bytes`` more."""
    free = machine.memory_bytes - machine.reserve_bytes - weight_bytes(model, weight_dtype)
    each = sequence_kv_bytes(model, kv_dtype, num_prompt_tokens, length)
    return max(int(free // (each + exact_bytes)), 0)


def memory_for(model: ModelConfig, tokens: int, reserve_bytes: float, weight_dtype: str, kv_dtype: str) -> float:
    """Return the memory in which ``tokens`` tokens fit."""
    return reserve_bytes + weight_bytes(model, weight_dtype) + tokens * kv_bytes(model, kv_dtype)


def normalized_tflops(num_parameters: int, tokens_per_second: float) -> float:
    """Return 2 x parameters x combined tokens/s in TFLOP/s (arXiv 2410.03960, section 4.3); ``num_parameters`` is the
    model's without a cut, so that saved work counts."""
    return 2 * num_parameters * tokens_per_second / 1e12


def max_speedup(model: ModelConfig, without: ModelConfig, input_tokens: int, output_tokens: int) -> float:
    """Return how many times the requests per FLOP of the model ``without`` a cut: what no hardware bound by computing
    exceeds, given that output tokens still run all layers (arXiv 2410.03960, Figure 2 right)."""
    return request_flops(without, input_tokens, output_tokens) / request_flops(model, input_tokens, output_tokens)


def requests_per_second(
    model: ModelConfig,
    machine: Machine,
    batch: int,
    input_tokens: int,
    output_tokens: int,
    weight_dtype: str,
    kv_dtype: str,
) -> float:
    """Return the bound on requests/s with ``batch`` requests at a time: prompts at the FLOP rate, then each decode
    step at the slower of the FLOP rate and of reading its weights and every layer's cache or state, which is written
    too.

    0 where the batch is empty. Without a memory bandwidth only FLOPs bound the steps.
    """
    if batch < 1 or not machine.flops_per_s:
        return 0.0
    prompts = batch * prompt_flops(model, input_tokens) / machine.flops_per_s
    steps = batch * output_flops(model, input_tokens, output_tokens) / machine.flops_per_s
    if machine.bytes_per_s:
        middle = input_tokens + output_tokens / 2
        read = kv_read_bytes(model, kv_dtype, middle, input_tokens)
        states = 2 * state_bytes(model, "float32" if weight_dtype == "float32" else "bfloat16")  # read and written
        step = step_weight_bytes(model, weight_dtype, batch) + batch * (read + states)
        steps = max(steps, (output_tokens - 1) * step / machine.bytes_per_s)
    return batch / (prompts + steps)


def distillation_flops_per_token(model: ModelConfig, context_length: int) -> float:
    """Return the FLOPs of distilling one token (arXiv 2410.03960, section 3.4): the layers below the cut once, those
    above and the head for teacher and student, the student's backward through its activations (attention twice), and
    through the weights of its trained Q, K and V."""
    mean = (context_length + 1) / 2
    teacher, whole = full_token(without_cut(model), mean, True), full_token(model, mean, True)
    key_value = 2.0 * model.hidden_size * sum(map(model.cached_numbers_of, model.upper_owners))
    student = whole.total - (full_token_below(model, mean, True).total - key_value)
    attention = whole.attention * (model.num_layers - model.cut) / model.num_layers
    queries = 2.0 * model.hidden_size * model.q_dim * (model.num_layers - model.cut)
    return teacher.total + 2 * student + attention + queries + key_value


def break_even_tokens(model: ModelConfig, context_length: int, distillation_tokens: float) -> float:
    """Return after how many prompt tokens, in prompts of ``context_length``, the FLOPs saved are those spent on
    distilling with ``distillation_tokens``; infinite without a cut."""
    plain = skipped_token(without_cut(model), context_length).total
    saved = plain - skipped_token(model, context_length).total
    spent = distillation_flops_per_token(model, context_length) * distillation_tokens
    return spent / saved if saved > 0 else float("inf")
