"""Triton's `postprocessing` model: token ids in, text out. The work is in kvforge.serving.postprocess."""

import json

import triton_python_backend_utils as pb_utils

from kvforge.serving.acks import AckSender
from kvforge.serving.postprocess import Postprocessor
from kvforge.serving.watchdog import exit_with_parent


class TritonPythonModel:
    def initialize(self, args):
        exit_with_parent()
        parameters = json.loads(args["model_config"])["parameters"]
        self._acks = AckSender(parameters["ack_socket"]["string_value"])
        self._postprocessor = Postprocessor(parameters["tokenizer_dir"]["string_value"])

    def execute(self, requests):
        for request in requests:
            self._respond(request, request.get_response_sender())

    def _respond(self, request, sender):
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        tokens, lengths = tensors.pop("TOKENS_BATCH"), tensors.pop("SEQUENCE_LENGTH")
        state = tensors.pop("STREAM_STATE", None)
        state = None if state is None else state.as_numpy()
        done = self._postprocessor.run(tokens.as_numpy(), lengths.as_numpy(), state, request.is_cancelled)
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if done.text is None:
            sender.send(flags=final)
        else:
            outputs = [pb_utils.Tensor("OUTPUT", done.text), *tensors.values()]
            sender.send(pb_utils.InferenceResponse(outputs), flags=final)
        if done.ack is not None:
            self._acks.send(done.ack, done.cancelled)

    def finalize(self):
        self._acks.close()
