"""SealPages: quantize whole pages of K and V to 2, 3 or 4 bits, in groups (KIVI, arXiv 2402.02750)."""

from plugins.operator import Operator
from plugins.registration import define
from plugins.seal_pages.reference import reference

OPERATOR = define(Operator(reference, version=2, writes=("k_codes", "v_codes", "k_groups", "v_groups")))
seal_pages = OPERATOR.write
