"""NVIDIA's Python package `tensorrt`, or a sentence on where to get it."""

from kvforge.common.errors import MissingToolError, first_line
from kvforge.common.extras import how_to_install

try:
    import tensorrt as trt
except (ImportError, OSError) as error:
    raise MissingToolError(
        f"TensorRT cannot be imported ({first_line(error)}); on a machine with an NVIDIA GPU install it with "
        f"{how_to_install('tensorrt')}, or work in NVIDIA's TensorRT container."
    ) from error

__all__ = ["trt"]
