"""Triton's `tensorrt_llm` model: a stub in front of the engine process. The work is in kvforge.serving.stub.stub."""

import triton_python_backend_utils as pb_utils

from kvforge.common.errors import EngineError
from kvforge.serving.stub.stub import Stub


class TritonPythonModel:
    def initialize(self, args):
        try:
            self._stub = Stub(pb_utils, args)
        except EngineError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests):
        self._stub.execute(requests)

    def finalize(self):
        self._stub.finalize()
