"""Triton's `postprocessing` model: token ids in, text out. The work is in kvforge.serving.postprocess."""

import json

import triton_python_backend_utils as pb_utils

from kvforge.serving.postprocess import Postprocessor
from kvforge.serving.stopper import Stopper
from kvforge.serving.watchdog import exit_with_parent


class TritonPythonModel:
    def initialize(self, args):
        exit_with_parent()
        config = json.loads(args["model_config"])
        self._stopper = Stopper(pb_utils, "tensorrt_llm")
        tokenizer_dir = config["parameters"]["tokenizer_dir"]["string_value"]
        self._postprocessor = Postprocessor(tokenizer_dir, self._stopper.stop)

    def execute(self, requests):
        for request in requests:
            self._respond(request, request.get_response_sender())

    def _respond(self, request, sender):
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        tokens, lengths = tensors.pop("TOKENS_BATCH"), tensors.pop("SEQUENCE_LENGTH")
        state = tensors.pop("STREAM_STATE", None)
        state = None if state is None else state.as_numpy()
        text = self._postprocessor.run(tokens.as_numpy(), lengths.as_numpy(), state, request.is_cancelled)
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if text is None:
            sender.send(flags=final)
        else:
            outputs = [pb_utils.Tensor("OUTPUT", text), *tensors.values()]
            sender.send(pb_utils.InferenceResponse(outputs), flags=final)

    def finalize(self):
        self._stopper.close()
