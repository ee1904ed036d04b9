"""AttentionMass: what attention the slots of a cache get, summed query by query for rules that evict tokens by it."""

from plugins.attention_mass.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define

_VARIANTS = Variants(("portable", "avx2", "avx512", "avx512_bf16"))
OPERATOR = define(
    Operator(
        reference,
        version=1,
        writes=("mass", "squares"),
        variants={"cpu_kernel.cpp": _VARIANTS},
    )
)
attention_mass = OPERATOR.write
