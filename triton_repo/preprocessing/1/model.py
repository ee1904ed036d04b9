"""Triton's `preprocessing` model: text in, token ids out. The work is in kvforge.serving.preprocess."""

import json

import triton_python_backend_utils as pb_utils

from kvforge.errors import RequestError, first_line
from kvforge.serving.contract import TEXT_INPUTS
from kvforge.serving.parameters import check_parameters, client_id, read_parameters
from kvforge.serving.preprocess import make_preprocessor
from kvforge.serving.processes import server_of_stub
from kvforge.serving.request_log import configure_model, log_request
from kvforge.serving.watchdog import end_with_server


class TritonPythonModel:
    def initialize(self, args):
        end_with_server(server_of_stub())
        configure_model(args)
        config = json.loads(args["model_config"])
        self._inputs = [tensor["name"] for tensor in config["input"]]
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._preprocessor = make_preprocessor(parameters)

    def execute(self, requests):
        return [self._respond(request) for request in requests]

    def _respond(self, request):
        request_id = ""
        try:
            request_id = client_id(request)
            check_parameters(read_parameters(request), TEXT_INPUTS)
            outputs = self._preprocessor.run(self._tensors(request))
        except RequestError as error:
            log_request("preprocessing", request_id, "refused", error=str(error))
            return _failed(str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:  # one request must not end the others of its batch
            return _failed(f"the request could not be read: {first_line(error)}", pb_utils.TritonError.INTERNAL)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])

    def _tensors(self, request):
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self._inputs}
        return {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}


def _failed(message, code):
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))
