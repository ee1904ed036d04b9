"""Triton's `postprocessing` model: token ids in, text out. The work is in kvforge.serving.text_models.postprocess."""

import json

import triton_python_backend_utils as pb_utils

from kvforge.serving.contract.failures import failure_of
from kvforge.serving.logs.request_log import configure_model
from kvforge.serving.processes.facts import server_of_stub
from kvforge.serving.processes.stacks import show_when_asked
from kvforge.serving.processes.watchdog import end_with_server
from kvforge.serving.text_models.postprocess import make_postprocessor

READ = ("TOKENS_BATCH", "SEQUENCE_LENGTH")


class TritonPythonModel:
    def initialize(self, args):
        end_with_server(server_of_stub())
        show_when_asked()
        configure_model(args)
        settings = json.loads(args["model_config"])["parameters"]
        self._postprocessor = make_postprocessor({key: value["string_value"] for key, value in settings.items()})

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            tensors = {tensor.name(): tensor for tensor in request.inputs()}
            read = {name: tensors.pop(name).as_numpy() for name in READ if name in tensors}
            texts = self._postprocessor.run(*map(read.get, READ))
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", texts), *tensors.values()])
        except BaseException as error:  # one request must not end the others of its batch
            failure = failure_of(error)
            code = getattr(pb_utils.TritonError, failure.code)
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError(failure.message, code))
