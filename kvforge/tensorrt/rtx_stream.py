"""Where TensorRT for RTX writes a plan to."""

import tensorrt_rtx_bindings as trt

from kvforge.tensorrt.direct_file import DirectFile


class FileWriter(trt.IStreamWriter):
    """Writes to a file. TensorRT goes on after a write that failed, and calls the plan built: ``error`` says."""

    def __init__(self, file: DirectFile) -> None:
        trt.IStreamWriter.__init__(self)
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Called by TensorRT; returns the bytes that were written."""
        if self.error is None:
            try:
                self._file.write(data)
                return len(data)
            except OSError as error:
                self.error = error
        return 0
