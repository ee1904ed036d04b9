"""Triton's `postprocessing` model: token ids in, text out. The work is in kvforge.serving.text_models.postprocess."""

import triton_python_backend_utils as pb_utils

from kvforge.serving.contract.failures import failure_of
from kvforge.serving.text_models.postprocess import Postprocessor
from kvforge.serving.text_models.preprocess import tokenizer_of
from kvforge.serving.triton_config import begin_model

READ = ("TOKENS_BATCH", "SEQUENCE_LENGTH")


class TritonPythonModel:
    def initialize(self, args):
        self._postprocessor = Postprocessor(tokenizer_of(begin_model(args)))

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
