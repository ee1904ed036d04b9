"""How far two computations of the same floats may lie apart, on any CPU.

Which kernel a matrix product runs, and so the order of its sums, depends on the CPU, on the number of rows and on the
number of threads. The bounds here hold for every order. Higham is "Accuracy and Stability of Numerical Algorithms",
2nd edition; Higham & Mary is "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41 (2019),
and "Sharper probabilistic backward error analysis for basic linear algebra kernels with random data", 42 (2020).
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_defs import ModelConfig, load_config

FP32 = torch.float32
SIGMAS = 6
"""Deviations that independent roundings may reach: 2e-9 of normal numbers lie beyond, and a test compares 1e5."""

FEW_CODES = 0.01
"""The share of an 8-bit cache's codes that may round the other way. fp32 is off by 1e-4 of a step or less, so that
twice that share of them is expected; a test may write but a few hundred."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error u of one rounding to ``dtype``, half an epsilon (Higham, theorem 2.2)."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype = FP32) -> float:
    """n u / (1 - n u): what n roundings in ``dtype`` do to a product, and to a sum of n terms relative to the sum of
    their sizes, in whatever order it is taken (Higham, lemma 3.1 and equation 3.5)."""
    rounded = terms * unit_roundoff(dtype)
    return rounded / (1 - rounded)


def sum_error(*terms: int, dtype: torch.dtype = FP32) -> float:
    """How far two orders of sums that feed each other, of so many terms each, lie apart: 2 gamma of all terms.

    Where the terms of a sum have one sign, this is a bound of the relative difference. Where their signs are random, it
    is one relative to the largest of many such sums: n errors that are independent add up to sqrt(n) u of the sum of
    sizes rather than n u (Higham & Mary 2019, theorem 2.4), and that sum is sqrt(n) times a typical result.
    """
    return 2 * gamma(sum(terms), dtype)


def roundings_error(count: int, dtype: torch.dtype) -> float:
    """How far two computations lie apart, relative to the largest element, that round their intermediate results
    ``count`` times to ``dtype``: SIGMAS * sqrt(count) * u, as the roundings are independent (Higham & Mary 2019)."""
    return SIGMAS * math.sqrt(count) * unit_roundoff(dtype)


def linear_bound(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0, roundings: int = 0) -> Tensor:
    """How far two orders of ``x @ weight.T + bias`` lie apart, element by element: 2 gamma (|x| |weight|' + |bias|)
    (Higham, equation 3.13), with gamma of the inner size, the bias and ``roundings`` more that made ``x`` or ``weight``
    in either computation. Shapes ``[n, k]``, ``[m, k]`` and ``[m]``; the result is ``[n, m]``."""
    sizes = x.abs() @ weight.abs().T + torch.as_tensor(bias).abs()
    return sum_error(x.shape[-1] + 1 + roundings, dtype=x.dtype) * sizes


def layer_terms(config: ModelConfig, tokens: int) -> int:
    """Terms of the sums on the longest path through a layer that attends to ``tokens``: three norms (one of heads), the
    projections, the scores, softmax's denominator and the weighted values; or those of linear attention, where each
    token rounds the state twice, and reads of it are three sums over keys."""
    norms = 2 * config.hidden_size + (config.head_dim if config.qk_norm else 0)
    attention = config.hidden_size + config.head_dim + 2 * tokens + config.num_heads * config.head_dim
    if (linear := config.linear) is not None:
        attention = max(attention, config.hidden_size + linear.sum_terms + 2 * tokens + linear.result_dim)
    return norms + attention + config.hidden_size + config.intermediate_size


def model_error(config: ModelConfig, tokens: int, *more: int) -> float:
    """How far two computations of a model's fp32 hidden states, K, V and logits lie apart, relative to the largest of
    them, where sequences have at most ``tokens``: ``roundings_error`` of either, of all terms of the layers' sums, the
    final norm and the head, and ``more`` sums behind them. Weights and states have random signs, so that a sum of n
    terms is off by sqrt(n) u of a typical result (Higham & Mary 2020, theorem 3.2), and the layers' errors add up as
    independent ones. The rigorous ``sum_error`` is ten times as much here, and the largest seen a tenth.

    Linear attention norms what a head reads of its state, S'q, and so multiplies its error where that nearly vanishes:
    of some hundred tokens and heads it does to a quarter of its usual size."""
    terms = config.num_layers * layer_terms(config, tokens) + 2 * config.hidden_size + sum(more)
    return 2 * roundings_error(terms, FP32) * (1 if config.linear is None else 4)


def rounded_model_error(config: ModelConfig, dtype: torch.dtype) -> float:
    """``roundings_error`` of a model whose graph rounds to ``dtype``: 14 times in each layer (2 norms with their gains;
    Q, K and V; 2 of RoPE; attention and its projection; gate, up, their product and down; 2 residuals are one rounding
    each, and one is counted with its projection), and thrice behind (norm, gain, head)."""
    return roundings_error(14 * config.num_layers + 3, dtype)


def logprob_error(vocab_size: int, largest: float, of_logits: float = 0.0) -> float:
    """How far fp32 log-probabilities lie apart whose logits, of size ``largest`` at most, lie ``of_logits * largest``
    apart. A logit moves and with it the logarithm of the sum, whose slope is at most one: twice that. The sum of
    ``vocab_size`` exponentials rounds by ``sum_error``, and so does the logarithm of it, whose slope is 1 / sum; the
    difference from the maximum, the exponential and the last two subtractions round numbers of twice ``largest``."""
    return 2 * of_logits * largest + sum_error(vocab_size) + 8 * largest * torch.finfo(FP32).eps


def low_rank_error(keys: Tensor, rank: int) -> float:
    """How far the best approximations of ``keys`` ``[n, m]`` of this rank lie apart, in the spectral norm, where one is
    made from K'K whose products were summed in fp32: the first order of Davis and Kahan's theorem, sqrt(2) |dG| /
    (s_r - s_(r+1)), with |dG| <= SIGMAS sqrt(n) u s_1^2 and the singular values s of the keys; and gamma of its own
    products. At full rank the basis spans everything, and only the products remain."""
    values = torch.linalg.svdvals(keys.double()).tolist()
    products = sum_error(*keys.shape) * values[0]
    if rank >= len(values):
        return products
    off = roundings_error(len(keys), FP32) * values[0] ** 2
    return products + math.sqrt(2) * off / (values[rank - 1] - values[rank])


def truncation_condition(keys: Tensor, rank: int) -> float:
    """What the rounding of ``keys`` ``[n, m]`` is multiplied by in a typical element of their best approximation of
    this rank: 1, and the perturbation of the last direction that is kept by the first that is not, s_r^2 / (s_r^2 -
    s_(r+1)^2) with the singular values s (the first order of Davis and Kahan's theorem), one direction of ``rank``."""
    squares = torch.linalg.svdvals(keys.double()).square().tolist()
    if rank >= len(squares):
        return 1.0
    return 1 + squares[rank - 1] / (squares[rank - 1] - squares[rank]) / math.sqrt(rank)


def turned_code_error(dtype: torch.dtype, head_dim: int) -> float:
    """What one code of an 8-bit cache that rounds the other way changes, relative to the largest score, K, V or logit.

    Two fp32 values on either side of the boundary between two codes are stored a step apart: 2^-3 of an e4m3 element,
    1/127 of the largest of an int8 row. It is one of the ``head_dim`` elements that a score sums, or one of a value, of
    which the largest is up to three times their root mean square. More than one, which are as likely to cancel, is
    rare: fp32's error is 1e-4 of a step.
    """
    step = 1 / 127 if dtype == torch.int8 else torch.finfo(dtype).eps
    return 3 * step / head_dim


def codes_apart(one: Tensor, other: Tensor) -> Tensor:
    """How many codes of an 8-bit format lie between: int8 as it is, e4m3 by the order of its bits."""
    if one.dtype == torch.int8:
        return (one.int() - other.int()).abs()
    bits = [x.view(torch.uint8).int() for x in (one, other)]
    ordered = [torch.where(b >= 128, 128 - b, b) for b in bits]
    return (ordered[0] - ordered[1]).abs()


def config_of(checkpoint: Path) -> ModelConfig:
    """The model of a checkpoint."""
    return load_config(json.loads((checkpoint / "config.json").read_text()))


def relative_error(got: Tensor, want: Tensor) -> float:
    """The largest difference over the largest expected magnitude, in fp64; infinite where one is NaN."""
    got, want = got.double(), want.double()
    error = float((got - want).abs().max() / want.abs().max())
    return math.inf if math.isnan(error) else error


def assert_near(got: Tensor, want: Tensor, bound: float, case: Any = "") -> None:
    """``got`` has the shape of ``want`` and differs by at most ``bound`` of its largest element."""
    assert got.shape == want.shape, f"{case} {tuple(got.shape)} instead of {tuple(want.shape)}"
    error = relative_error(got, want) if want.numel() and not torch.equal(got, want) else 0.0
    assert error <= bound, f"{case} differs by {error:.3g} of the largest element, and rounding by {bound:.3g} at most"


def assert_within(got: Tensor, want: Tensor, bound: Tensor | float, case: Any = "") -> None:
    """``got`` has the shape of ``want`` and differs by at most ``bound``, of each element where it is a tensor."""
    assert got.shape == want.shape, f"{case} {tuple(got.shape)} instead of {tuple(want.shape)}"
    off = (got.double() - want.double()).abs()
    assert (off <= bound).all(), f"{case} differs by up to {float(off.max()):.3g}"
