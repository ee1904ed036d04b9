"""Sends responses and errors through Triton's response senders."""

import logging
import os
from typing import Any

import numpy as np

from kvforge.serving.contract.failures import Failure
from kvforge.serving.stub.active import ActiveRequest

logger = logging.getLogger("kvforge.serving")

SHARED_MEMORY = "/dev/shm"
LARGE_BYTES = 1 << 20


class Responder:
    """Builds and sends. `pb` is triton_python_backend_utils."""

    def __init__(self, pb: Any) -> None:
        self._pb = pb

    def respond(self, active: ActiveRequest, arrays: dict[str, np.ndarray], final: bool) -> None:
        """Send a response. Raises OSError, before anything is sent, where shared memory has no room for it: Triton
        would fail half-way, and a last response that failed half-way leaves the client waiting for ever."""
        check_room(sum(array.nbytes for array in arrays.values()))
        tensors = [self._pb.Tensor(name, array) for name, array in arrays.items()]
        flags = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with active.sender_lock:
            active.closed = final
            active.sender.send(self._pb.InferenceResponse(output_tensors=tensors), flags=flags)

    def end(self, sender: Any, arrays: dict[str, np.ndarray]) -> None:
        """End a request that was not accepted with one response. Never raises."""
        tensors = [self._pb.Tensor(name, array) for name, array in arrays.items()]
        self._end(sender, self._pb.InferenceResponse(output_tensors=tensors))

    def fail(self, active: ActiveRequest, failure: Failure) -> None:
        """End an accepted request with an error."""
        with active.sender_lock:
            active.closed = True
            self.refuse(active.sender, failure)

    def refuse(self, sender: Any, failure: Failure) -> None:
        """End a request with an error. Never raises."""
        error = self._pb.TritonError(failure.message, getattr(self._pb.TritonError, failure.code))
        self._end(sender, self._pb.InferenceResponse(output_tensors=[], error=error))

    def _end(self, sender: Any, response: Any) -> None:
        try:
            sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as problem:
            logger.error("an error could not be sent: %s", problem)

    def close(self, active: ActiveRequest, decoupled: bool) -> bool:
        """End a request whose output left in another way; False where it has had its end."""
        with active.sender_lock:
            if active.closed:
                return False
            active.closed = True
            self.acknowledge(active.sender, decoupled)
            return True

    def acknowledge(self, sender: Any, decoupled: bool) -> None:
        """End a request that has no output: without a response, or with an empty one where each request has one."""
        if decoupled:
            sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            self._end(sender, self._pb.InferenceResponse(output_tensors=[]))


def check_room(num_bytes: int) -> None:
    """Raise OSError when shared memory is too full for a large response."""
    if num_bytes < LARGE_BYTES:
        return
    stat = os.statvfs(SHARED_MEMORY)
    free = stat.f_bavail * stat.f_frsize
    if free < 2 * num_bytes:
        raise OSError(
            f"a response of {num_bytes >> 20} MiB does not fit {SHARED_MEMORY}, which has {free >> 20} MiB free"
        )
