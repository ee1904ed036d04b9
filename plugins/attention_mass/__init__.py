"""AttentionMass: what attention the slots of a cache get, summed query by query for rules that evict tokens by it."""

from typing import Any

from torch import Tensor

from plugins.attention_mass.functional import define_twins
from plugins.attention_mass.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define, writes_are_functional

_VARIANTS = Variants(("portable", "avx2", "avx512", "avx512_bf16"))
OPERATOR = define(
    Operator(
        reference,
        version=1,
        writes=("mass", "squares"),
        variants={"cpu_kernel.cpp": _VARIANTS},
    )
)
_FUNCTIONAL = define_twins(OPERATOR)


def attention_mass(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Statistics of attention weights, in place, as `plugins.attention_mass.reference` defines them; returns what it
    was given (SSA style). Under `plugins.registration.functional_writes` it returns new ones and leaves those
    given as they are.
    """
    if writes_are_functional():
        return _FUNCTIONAL(OPERATOR.bind(*args, **kwargs))
    return OPERATOR.write(*args, **kwargs)
