"""Where TensorRT for RTX writes a plan to."""

from typing import BinaryIO

import tensorrt_rtx_bindings as trt

from kvforge.tensorrt.direct_file import DirectFile


class FileWriter(trt.IStreamWriter):
    """Writes to an open file. TensorRT goes on after a write that failed, and calls the plan built: ``error`` says."""

    def __init__(self, file: BinaryIO) -> None:
        trt.IStreamWriter.__init__(self)
        self._file = DirectFile(file)
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

    def finish(self) -> None:
        """Wait for what is being written; ``error`` says whether all of it was."""
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error
