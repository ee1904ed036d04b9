"""Where TensorRT for RTX writes a plan to."""

from typing import BinaryIO

import tensorrt_rtx_bindings as trt


class FileWriter(trt.IStreamWriter):
    """Writes to an open file."""

    def __init__(self, file: BinaryIO) -> None:
        trt.IStreamWriter.__init__(self)
        self._file = file

    def write(self, data: bytes) -> int:
        """Called by TensorRT; returns the bytes that were written."""
        return self._file.write(data)
