"""The operators of kvforge, one package each, all faces of an operator side by side.

`OPERATORS` is the table of them; `load_library` makes the compiled CPU kernels available.
"""

from plugins.chunk_cache_update import OPERATOR as _CHUNK_CACHE_UPDATE
from plugins.chunk_cache_update import chunk_cache_update
from plugins.errors import PluginBuildError, PluginError, PluginLoadError
from plugins.landmark_select import OPERATOR as _LANDMARK_SELECT
from plugins.landmark_select import landmark_select
from plugins.library import load_library
from plugins.low_rank_key_reconstruct import OPERATOR as _LOW_RANK_KEY_RECONSTRUCT
from plugins.low_rank_key_reconstruct import low_rank_key_reconstruct
from plugins.operator import Operator
from plugins.packed_linear import OPERATOR as _PACKED_LINEAR
from plugins.packed_linear import packed_linear
from plugins.paged_attention import OPERATOR as _PAGED_ATTENTION
from plugins.paged_attention import paged_attention
from plugins.rope_paged_kv_write import OPERATOR as _ROPE_PAGED_KV_WRITE
from plugins.rope_paged_kv_write import rope_paged_kv_write
from plugins.selected_kv_write import OPERATOR as _SELECTED_KV_WRITE
from plugins.selected_kv_write import selected_kv_write
from plugins.speculative_verify import OPERATOR as _SPECULATIVE_VERIFY
from plugins.speculative_verify import speculative_verify

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        _ROPE_PAGED_KV_WRITE,
        _PAGED_ATTENTION,
        _LOW_RANK_KEY_RECONSTRUCT,
        _SPECULATIVE_VERIFY,
        _PACKED_LINEAR,
        _LANDMARK_SELECT,
        _CHUNK_CACHE_UPDATE,
        _SELECTED_KV_WRITE,
    )
}

__all__ = [
    "OPERATORS",
    "Operator",
    "PluginBuildError",
    "PluginError",
    "PluginLoadError",
    "chunk_cache_update",
    "landmark_select",
    "load_library",
    "low_rank_key_reconstruct",
    "packed_linear",
    "paged_attention",
    "rope_paged_kv_write",
    "selected_kv_write",
    "speculative_verify",
]
