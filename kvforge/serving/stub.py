"""The `tensorrt_llm` model: a thin, decoupled stub between Triton and the engine process."""

import json
import logging
import os
import secrets
import threading
import time
from typing import Any

import numpy as np

from kvforge.errors import EngineError, RequestError
from kvforge.serving.acks import AckListener
from kvforge.serving.active import CANCELLED, INTERNAL, INVALID_ARG, UNAVAILABLE, ActiveRequest
from kvforge.serving.engine_client import EngineClient
from kvforge.serving.metrics import EngineMetrics
from kvforge.serving.request import is_stop, parse_batch
from kvforge.serving.responses import chunk_arrays, heartbeat_arrays
from kvforge.serving.senders import SenderPool
from kvforge.serving.watchdog import exit_with_parent

logger = logging.getLogger("kvforge.serving")

STREAM_KEY = "stream_key"
HEARTBEAT_S = 0.25
MAX_HEARTBEATS_PER_TICK = 32


class Stub:
    """What `triton_repo/tensorrt_llm/1/model.py` calls. `pb` is triton_python_backend_utils."""

    def __init__(self, pb: Any, args: dict[str, str]) -> None:
        """Start the engine and wait until it is loaded. Raises EngineError with the engine's message."""
        self._pb = pb
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._exclude_input = parameters.get("exclude_input_in_output", "true").lower() == "true"
        self._poll_s = float(parameters.get("cancellation_check_period_ms", "50")) / 1000.0
        self._input_names = [tensor["name"] for tensor in config["input"]]
        self._active: dict[int, ActiveRequest] = {}
        self._by_engine_id: dict[str, ActiveRequest] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._metrics = EngineMetrics(pb, args["model_name"], args["model_version"])
        self._senders = SenderPool(self._send)
        self._acks = AckListener(parameters["ack_socket"], self.on_ack)
        command = [*json.loads(parameters["engine_command"]), "--server-pid", str(os.getppid())]
        self._client = EngineClient(command, self)
        exit_with_parent(before_exit=self._client.kill)
        self._client.start()
        self._watch = threading.Thread(target=self._watch_requests, name="cancel-watch", daemon=True)
        self._watch.start()

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; every one gets its responses, FINAL or an error included, from the sender threads."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except RequestError as error:
                self._refuse(sender, str(error), INVALID_ARG)
            except EngineError as error:
                self._refuse(sender, str(error), UNAVAILABLE)
            except Exception as error:
                logger.exception("a request could not be read")
                self._refuse(sender, f"the request could not be read: {error}", INTERNAL)

    def finalize(self) -> None:
        """Answer what is open with an error, stop the engine, join the threads."""
        self._closing.set()
        self.on_lost("the server is shutting down")
        self._client.close()
        self._watch.join(timeout=5.0)
        self._senders.close()
        self._acks.close()
        self._metrics.close()

    # -- requests -----------------------------------------------------------------------------------------

    def _accept(self, request: Any, sender: Any) -> None:
        tensors = {}
        for name in self._input_names:
            tensor = self._pb.get_input_tensor_by_name(request, name)
            if tensor is not None:
                tensors[name] = tensor.as_numpy()
        client_id = request.request_id()
        if is_stop(tensors):
            self._stop(client_id)
            sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        stream_key = tensors.pop(STREAM_KEY, None)
        key = secrets.randbits(62) if stream_key is None else int(stream_key.reshape(-1)[0])
        prompts = parse_batch(tensors, self._exclude_input)
        outputs = frozenset(request.requested_output_names())
        active = ActiveRequest(key, client_id, sender, prompts, outputs, in_ensemble=stream_key is not None)
        with self._lock:
            self._active[key] = active
            self._by_engine_id.update(dict.fromkeys(active.engine_ids, active))
        try:
            for engine_id, prompt in zip(active.engine_ids, prompts, strict=True):
                self._client.send({"op": "add", "id": engine_id, "prompt": prompt.prompt, "params": prompt.params})
        except EngineError:
            self._forget(active)
            raise

    def _stop(self, client_id: str) -> None:
        """Cancel what runs under this id."""
        with self._lock:
            found = [a for a in self._active.values() if client_id and client_id == a.client_id]
        for active in found:
            self._end(active, "the request was cancelled", CANCELLED)

    def _end(self, active: ActiveRequest, message: str, code: str) -> None:
        """End a request early: an error for its client, an abort for the engine. Idempotent."""
        for engine_id in active.engine_ids:
            try:
                self._client.send({"op": "abort", "id": engine_id})
            except EngineError:
                break
        active.fail(message, code)
        self._senders.schedule(active)

    def _forget(self, active: ActiveRequest) -> None:
        with self._lock:
            self._active.pop(active.key, None)
            for engine_id in active.engine_ids:
                self._by_engine_id.pop(engine_id, None)

    # -- what the engine reports (on the client's reader thread) --------------------------------------------

    def on_tokens(self, outputs: list) -> None:
        for engine_id, index, tokens, log_probs, finish_reason, detail in outputs:
            active = self._by_engine_id.get(engine_id)
            if active is None:
                # Nobody waits for it: cancelled a moment ago, or it outlived a restart of the engine.
                if finish_reason is None:
                    self._client.send({"op": "abort", "id": engine_id})
                continue
            if finish_reason in ("error", "abort"):
                code = INTERNAL if finish_reason == "error" else CANCELLED
                self._end(active, f"the engine gave up this request: {detail}", code)
            elif active.add(engine_id, index, tokens, log_probs, finish_reason is not None):
                self._senders.schedule(active)

    def on_refused(self, request_id: str, error: str) -> None:
        active = self._by_engine_id.get(request_id)
        if active is not None:
            self._end(active, error, INVALID_ARG)

    def on_stats(self, stats: dict) -> None:
        self._metrics.update(stats)

    def on_ack(self, stream_key: int, cancelled: bool) -> None:
        """Postprocessing has passed on the last response of this request (on the listener's thread)."""
        active = self._active.get(stream_key)
        if active is None:
            return
        active.acknowledge()
        if cancelled:
            self._end(active, "the request was cancelled", CANCELLED)
        else:
            self._senders.schedule(active)

    def on_lost(self, error: str) -> None:
        with self._lock:
            lost = list(self._active.values())
        for active in lost:
            active.fail(error, UNAVAILABLE)
            self._senders.schedule(active)

    # -- responses (on the sender threads) ------------------------------------------------------------------

    def _send(self, active: ActiveRequest) -> None:
        chunks, error, heartbeat = active.take()
        if error is not None:
            self._forget(active)
            with active.sender_lock:
                active.closed = True
                self._refuse(active.sender, *error)
            return
        try:
            for chunk in chunks:
                if chunk.final:
                    self._forget(active)
                self._respond(active, chunk_arrays(active, chunk), chunk.final)
            if heartbeat:
                self._respond(active, heartbeat_arrays(active), False)
        except Exception as failure:
            logger.error("a response could not be sent: %s", failure)
            self._end(active, f"a response could not be sent: {failure}", INTERNAL)

    def _respond(self, active: ActiveRequest, arrays: dict[str, np.ndarray], final: bool) -> None:
        tensors = [self._pb.Tensor(name, array) for name, array in arrays.items()]
        flags = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with active.sender_lock:
            active.closed = final
            active.sender.send(self._pb.InferenceResponse(output_tensors=tensors), flags=flags)

    def _refuse(self, sender: Any, message: str, code: str) -> None:
        error = self._pb.TritonError(message, getattr(self._pb.TritonError, code))
        try:
            sender.send(
                self._pb.InferenceResponse(output_tensors=[], error=error),
                flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
        except Exception as failure:
            logger.error("an error could not be sent: %s", failure)

    # -- cancellation ---------------------------------------------------------------------------------------

    def _watch_requests(self) -> None:
        """Poll direct requests for a cancel; let the ensemble poll its own by an empty response now and then."""
        while not self._closing.wait(self._poll_s):
            with self._lock:
                active = list(self._active.values())
            now = time.monotonic()
            silent = [a for a in active if a.in_ensemble and now - a.last_sent > HEARTBEAT_S]
            for request in sorted(silent, key=lambda a: a.last_sent)[:MAX_HEARTBEATS_PER_TICK]:
                request.beat()
                self._senders.schedule(request)
            for request in active:
                if not request.in_ensemble and self._is_cancelled(request):
                    self._end(request, "the request was cancelled", CANCELLED)

    def _is_cancelled(self, active: ActiveRequest) -> bool:
        with active.sender_lock:
            return not active.closed and active.sender.is_cancelled()
