"""Triton's `tensorrt_llm_bls` model: text in and out, calling tensorrt_llm. Its work: kvforge.serving.text_models."""

import triton_python_backend_utils as pb_utils

from kvforge.serving.logs.request_log import configure_model
from kvforge.serving.processes.facts import server_of_stub
from kvforge.serving.processes.stacks import show_when_asked
from kvforge.serving.processes.watchdog import end_with_server
from kvforge.serving.text_models.bls import TextServer


class TritonPythonModel:
    def initialize(self, args):
        end_with_server(server_of_stub())
        show_when_asked()
        configure_model(args)
        self._server = TextServer(pb_utils, args)

    def execute(self, requests):
        self._server.execute(requests)

    def finalize(self):
        self._server.close()
