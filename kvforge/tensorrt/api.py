"""NVIDIA's Python module of the flavour of TensorRT that is used here, or a sentence on where to get one."""

from typing import TYPE_CHECKING

from kvforge.tensorrt.installed import flavour

if TYPE_CHECKING:
    import tensorrt as trt
else:
    trt = flavour().load()

__all__ = ["trt"]
