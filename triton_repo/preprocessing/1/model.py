"""Triton's `preprocessing` model: text in, token ids out. The work is in kvforge.serving.text_models."""

import triton_python_backend_utils as pb_utils

from kvforge.serving.text_models.preprocess_server import PreprocessingServer
from kvforge.serving.triton_config import begin_model


class TritonPythonModel:
    def initialize(self, args):
        self._server = PreprocessingServer(pb_utils, begin_model(args))

    def execute(self, requests):
        self._server.execute(requests)

    def finalize(self):
        self._server.close()
