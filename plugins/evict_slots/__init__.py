"""EvictSlots: of each sequence and KV head the best slots stay, in the first places of its pages."""

from plugins.evict_slots.reference import reference
from plugins.operator import Operator
from plugins.registration import define

OPERATOR = define(
    Operator(reference, version=1, writes=("position", "k_pool", "v_pool", "k_scales", "v_scales", "mass", "squares"))
)
evict_slots = OPERATOR.write
