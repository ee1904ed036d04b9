"""The operators of kvforge, one package each, all faces of an operator side by side.

`OPERATORS` is the table of them; `load_library` makes the compiled CPU kernels available.
"""

from plugins.errors import PluginBuildError, PluginError, PluginLoadError
from plugins.library import load_library
from plugins.operator import Operator
from plugins.paged_attention import OPERATOR as _PAGED_ATTENTION
from plugins.paged_attention import paged_attention
from plugins.rope_paged_kv_write import OPERATOR as _ROPE_PAGED_KV_WRITE
from plugins.rope_paged_kv_write import rope_paged_kv_write

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in (_ROPE_PAGED_KV_WRITE, _PAGED_ATTENTION)}

__all__ = [
    "OPERATORS",
    "Operator",
    "PluginBuildError",
    "PluginError",
    "PluginLoadError",
    "load_library",
    "paged_attention",
    "rope_paged_kv_write",
]
