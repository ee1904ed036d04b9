"""Triton's `preprocessing` model: text in, token ids out. The work is in kvforge.serving.preprocess_server."""

import triton_python_backend_utils as pb_utils

from kvforge.serving.preprocess_server import PreprocessingServer
from kvforge.serving.processes import server_of_stub
from kvforge.serving.request_log import configure_model
from kvforge.serving.watchdog import end_with_server


class TritonPythonModel:
    def initialize(self, args):
        end_with_server(server_of_stub())
        configure_model(args)
        self._server = PreprocessingServer(pb_utils, args)

    def execute(self, requests):
        self._server.execute(requests)

    def finalize(self):
        self._server.close()
