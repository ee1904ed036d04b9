"""The TensorRT plugins of all operators."""

from typing import TYPE_CHECKING

from plugins.registry import backend_modules
from plugins.trt_plugin import PluginDefinition

if TYPE_CHECKING:
    from onnx import ModelProto

PLUGINS: dict[str, PluginDefinition] = {
    plugin.name: plugin for module in backend_modules("tensorrt").values() for plugin in module.PLUGINS
}


def rewrite_for_plugins(model: "ModelProto") -> None:
    """Let each operator whose `trt.py` has `rewrite` put plugins of its own in place of its nodes."""
    for module in backend_modules("tensorrt").values():
        if hasattr(module, "rewrite"):
            module.rewrite(model)


def register_plugins() -> None:
    """Make every plugin known to TensorRT 11 in this process; needs the Python package `tensorrt`."""
    from plugins.trt_aot import register

    for plugin in PLUGINS.values():
        register(plugin)


def register_rtx_plugins() -> None:
    """Make every plugin known to TensorRT for RTX in this process; needs its Python bindings."""
    from plugins.trt_v3 import register

    for plugin in PLUGINS.values():
        register(plugin)
