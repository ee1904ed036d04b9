"""The `preprocessing` model: answers Triton's requests with what `preprocess.Preprocessor` makes of them.

A request with a long text is answered by a thread (lanes.py), so it holds up no other.
"""

from functools import partial
from typing import Any

import numpy as np

from kvforge.serving.contract.failures import CANCELLED, failure_of
from kvforge.serving.contract.inputs import TEXT_INPUTS
from kvforge.serving.contract.parameters import check_parameters, client_id, read_parameters
from kvforge.serving.logs.request_log import log_request
from kvforge.serving.stub.responder import Responder
from kvforge.serving.text_models.lanes import TextLanes
from kvforge.serving.text_models.preprocess import make_preprocessor, num_text_bytes
from kvforge.serving.triton_config import TritonConfig


class PreprocessingServer:
    """What `triton_repo/preprocessing/1/model.py` calls. `pb` is triton_python_backend_utils."""

    def __init__(self, pb: Any, config: TritonConfig) -> None:
        """Raises EngineError when the engine has no tokenizer."""
        self._pb = pb
        self._inputs = config.inputs
        self._preprocessor = make_preprocessor(config)
        self._responder = Responder(pb)
        self._lanes = TextLanes()

    def execute(self, requests: list[Any]) -> None:
        """Each request gets its one response, some of them later."""
        for request in requests:
            sender = request.get_response_sender()
            request_id = ""
            try:
                request_id = client_id(request)
                check_parameters(read_parameters(request), TEXT_INPUTS, own=())
                tensors = self._tensors(request)
                if not self._lanes.take(
                    num_text_bytes(tensors), partial(self._answer_later, sender, request_id, tensors)
                ):
                    self._answer(sender, request_id, tensors)
            except BaseException as error:  # one request must not end the others of its batch
                self._fail(sender, request_id, error)

    def close(self) -> None:
        """Finish what waits."""
        self._lanes.close()

    def _answer(self, sender: Any, request_id: str, tensors: dict[str, np.ndarray]) -> None:
        """Never raises."""
        try:
            outputs = self._preprocessor.run(tensors)
            response = self._pb.InferenceResponse([self._pb.Tensor(name, value) for name, value in outputs.items()])
            sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except BaseException as error:
            self._fail(sender, request_id, error)

    def _answer_later(self, sender: Any, request_id: str, tensors: dict[str, np.ndarray]) -> None:
        try:
            cancelled = sender.is_cancelled()
        except BaseException as error:
            self._fail(sender, request_id, error)
            return
        if cancelled:
            self._responder.refuse(sender, CANCELLED)
        else:
            self._answer(sender, request_id, tensors)

    def _fail(self, sender: Any, request_id: str, error: BaseException) -> None:
        failure = failure_of(error)
        if failure.outcome == "refused":
            log_request("preprocessing", request_id, "refused", error=failure.message)
        self._responder.refuse(sender, failure)

    def _tensors(self, request: Any) -> dict[str, np.ndarray]:
        """Copies: numbers lie in shared memory of the request, which a long text outlasts."""
        tensors = {name: self._pb.get_input_tensor_by_name(request, name) for name in self._inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        return {name: array if array.dtype == object else array.copy() for name, array in arrays.items()}
