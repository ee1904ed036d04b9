"""Triton's `postprocessing` model: token ids in, text out. The work is in kvforge.serving.text_models.postprocess."""

import json

import triton_python_backend_utils as pb_utils

from kvforge.serving.contract.failures import Failure, failure_of
from kvforge.serving.logs.request_log import configure_model
from kvforge.serving.processes.facts import server_of_stub
from kvforge.serving.processes.watchdog import end_with_server
from kvforge.serving.stub.acks import AckSender
from kvforge.serving.stub.responder import Responder
from kvforge.serving.text_models.postprocess import make_postprocessor

READ = ("TOKENS_BATCH", "SEQUENCE_LENGTH", "STREAM_STATE")


class TritonPythonModel:
    def initialize(self, args):
        end_with_server(server_of_stub())
        configure_model(args)
        settings = json.loads(args["model_config"])["parameters"]
        parameters = {key: value["string_value"] for key, value in settings.items()}
        self._acks = AckSender(parameters["ack_socket"])
        self._responder = Responder(pb_utils)
        self._postprocessor = make_postprocessor(parameters)

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._respond(request, sender)
            except BaseException as error:  # one request must not end the others of its batch
                self._responder.refuse(sender, failure_of(error))

    def _respond(self, request, sender):
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        read = {name: tensors.pop(name).as_numpy() for name in READ if name in tensors}
        done = self._postprocessor.run(*map(read.get, READ), request.is_cancelled)
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            if done.error is not None:
                self._responder.refuse(sender, Failure("failed", done.error))
            elif done.text is None:
                sender.send(flags=final)
            else:
                outputs = [pb_utils.Tensor("OUTPUT", done.text), *tensors.values()]
                sender.send(pb_utils.InferenceResponse(outputs), flags=final)
        except BaseException:  # such as no room in shared memory: an error ends the ensemble, and the engine is to know
            if done.ack is not None:
                self._acks.send(done.ack, True)
            raise
        if done.ack is not None:
            self._acks.send(done.ack, done.cancelled)

    def finalize(self):
        self._acks.close()
