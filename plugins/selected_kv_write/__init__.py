"""SelectedKvWrite: keys rebuilt from factors and values from host memory go to their places in the pools (ShadowKV)."""

from plugins.operator import Operator
from plugins.registration import define
from plugins.selected_kv_write.reference import reference

OPERATOR = define(Operator(reference, version=2, writes=("k_pool", "v_pool")))
selected_kv_write = OPERATOR.write
