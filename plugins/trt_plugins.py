"""The TensorRT plugins of all operators."""

from plugins.landmark_select.trt import PLUGINS as _LANDMARK_SELECT
from plugins.low_rank_key_reconstruct.trt import PLUGINS as _LOW_RANK_KEY_RECONSTRUCT
from plugins.paged_attention.trt import PLUGINS as _PAGED_ATTENTION
from plugins.rope_paged_kv_write.trt import PLUGINS as _ROPE_PAGED_KV_WRITE
from plugins.speculative_verify.trt import PLUGINS as _SPECULATIVE_VERIFY
from plugins.trt_plugin import PluginDefinition, register

PLUGINS: dict[str, PluginDefinition] = {
    plugin.name: plugin
    for plugin in (
        *_ROPE_PAGED_KV_WRITE,
        *_PAGED_ATTENTION,
        *_LOW_RANK_KEY_RECONSTRUCT,
        *_SPECULATIVE_VERIFY,
        *_LANDMARK_SELECT,
    )
}


def register_plugins() -> None:
    """Make every plugin known to TensorRT in this process; needs the Python package `tensorrt`."""
    for plugin in PLUGINS.values():
        register(plugin)
