"""Sends `stop` requests to the engine's model from inside another Triton model."""

import queue
import threading
from typing import Any

import numpy as np


class Stopper:
    """A thread that makes the calls, because one waits for its answer and postprocessing must not."""

    def __init__(self, pb: Any, model: str) -> None:
        self._pb = pb
        self._model = model
        self._keys: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stopper", daemon=True)
        self._thread.start()

    def stop(self, key: int) -> None:
        """Cancel the request with this stream key, soon. Never blocks."""
        self._keys.put(key)

    def close(self) -> None:
        self._keys.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (key := self._keys.get()) is not None:
            request = self._pb.InferenceRequest(
                model_name=self._model,
                request_id=str(key),
                requested_output_names=["sequence_length"],
                inputs=[
                    self._pb.Tensor("input_ids", np.zeros((1, 0), dtype=np.int32)),
                    self._pb.Tensor("input_lengths", np.zeros((1, 1), dtype=np.int32)),
                    self._pb.Tensor("request_output_len", np.zeros((1, 1), dtype=np.int32)),
                    self._pb.Tensor("stop", np.ones((1, 1), dtype=bool)),
                ],
            )
            for _ in request.exec(decoupled=True):
                pass
