"""The models `ensemble` and `tensorrt_llm_bls`: text to text by business logic scripting, Triton's calls from one model
to another.

Text is tokenized and written in this process; `tensorrt_llm` is called, one thread per open request waiting for the
call's end. Requests beyond these threads wait in a room (waiting_room.py). The tokens come on a connection of their own
(contract/text_rows.py), and sender threads make responses of them. Long texts are tokenized in threads of their own
(lanes.py), before the request takes one of these. A thread looks for clients that have gone, for deadlines of requests
that wait, and for the drain file.

Triton's own ensembles are not used: they do not tell their steps that a client has gone, send responses that come
close together in any order, and cost a response three hops.

An error behind a response never arrives at such a caller: Triton waits for ever, or loses it. So the stub is asked for
errors as tensors (parameters.ERRORS_AS_TENSORS).
"""

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from kvforge.common.errors import EngineError, RequestError
from kvforge.serving.contract.failures import (
    CANCELLED,
    CODES,
    SHUTTING_DOWN,
    FailedError,
    Failure,
    UnavailableError,
    failure_of,
    past_deadline,
)
from kvforge.serving.contract.inputs import TEXT_INPUTS, refuse_unsupported
from kvforge.serving.contract.parameters import (
    ERRORS_AS_TENSORS,
    STREAM_INTERVAL,
    TIMEOUT,
    check_parameters,
    client_id,
    read_parameters,
    stream_interval,
    timeout_s,
)
from kvforge.serving.contract.response_fields import ERROR, FINISH_REASON, STOP_REASON
from kvforge.serving.contract.stream_keys import STREAM_KEY, StreamKeys
from kvforge.serving.contract.text_rows import TextRow, socket_path
from kvforge.serving.logs.request_log import log_request
from kvforge.serving.processes.state_files import DrainClock
from kvforge.serving.stub.admission import Admission
from kvforge.serving.stub.responder import Responder, check_room
from kvforge.serving.stub.sender_pool import SenderPool
from kvforge.serving.text_models.answer import Answer
from kvforge.serving.text_models.engine_link import EngineLink
from kvforge.serving.text_models.lanes import TextLanes
from kvforge.serving.text_models.preprocess import make_preprocessor, num_text_bytes, tokenizer_of
from kvforge.serving.text_models.waiting_room import WaitingRoom
from kvforge.serving.triton_config import TritonConfig

logger = logging.getLogger("kvforge.serving")

ENGINE_MODEL = "tensorrt_llm"
TEXT_OUTPUT = "text_output"
LANES = {"ensemble": 0, "tensorrt_llm_bls": 1}
"""Of the models' stream keys."""
MAX_THREADS, SPARE_THREADS = 256, 32
WATCH_PERIOD_S, MAX_LOOKS = 0.05, 10
"""A question to Triton whether a client has gone costs 60 µs; those not asked longest come first."""
MAX_PIECES = 16
"""Responses of one request that leave in a turn of a sender thread's: an engine that makes tokens faster than they
leave would keep the thread with one request, and the others would wait for its end."""
LATE_S = 60.0
"""Behind the end of a call its last tokens are not waited for longer. They come on a connection of their own, and where
every core is busy many seconds later: 10 s were not enough."""
LINGER_S = 15.0
"""For so long the responses of an ended call are kept. Taking the last one makes a thread of Triton's, which does not
hold the interpreter's lock, let go of them all: were it the last holder, it would free Python objects without the lock
and so corrupt the heap. It lets go within milliseconds, and nothing tells when."""

# Inputs for the text models, then what the engine calls an input, where the names differ.
TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
NOT_OFFERED = (
    "num_draft_tokens", "use_draft_logits", "image_input", "image_bytes_input", "image_url_input", "video_bytes_input"
)  # fmt: skip
TO_ENGINE = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty", "stream": "streaming"}
NEEDED = ("output_ids", FINISH_REASON, STOP_REASON)
"""Outputs of `tensorrt_llm` that say how a request failed."""


@dataclass
class ForwardedRequest:
    """One request on its way: when it came, its deadline, and its inputs once they were read."""

    request: Any
    sender: Any
    arrived: float
    limit: float | None = None
    last_asked: float = 0.0
    texts: dict[str, np.ndarray] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class TextServer:
    """What the `model.py` of both models calls. `pb` is triton_python_backend_utils."""

    def __init__(self, pb: Any, config: TritonConfig) -> None:
        """Raises EngineError when the engine has no tokenizer."""
        self._pb = pb
        self._inputs = config.inputs
        self._accumulate = config.parameters["accumulate_tokens"].lower() == "true"
        self._stream_interval = config.options.stream_interval
        self._preprocessor = make_preprocessor(config)
        self._tokenizer = tokenizer_of(config)
        self._name = config.name
        lane = LANES[self._name]
        self._keys = StreamKeys(config.run_dir, lane)
        self._open: dict[int, Answer] = {}
        self._senders: SenderPool[Answer] = SenderPool(self._send)
        self._link = EngineLink(socket_path(config.run_dir), lane, self._on_rows, self._on_lost)
        self._responder = Responder(pb)
        max_queue_size = config.options.max_queue_size
        self._admission = Admission(max_queue_size)
        self._admission.max_num_seqs = config.max_batch_size
        # More than run at once, so that the engine's own queue is never empty while requests wait here.
        num_threads = min(config.max_batch_size + min(max_queue_size, SPARE_THREADS), MAX_THREADS)
        self._ended: queue.SimpleQueue[tuple[float, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._let_go, name="bls-ended", daemon=True).start()
        self._room: WaitingRoom[ForwardedRequest] = WaitingRoom(num_threads, "bls")
        self._drain = DrainClock(config.run_dir)
        self._told_open = 0
        self._lanes = TextLanes()
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="bls-watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; each gets its responses from a thread of the pool."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._admission.enter(1)
            except UnavailableError as error:
                self._responder.refuse(sender, error.failure)
                continue
            call = ForwardedRequest(request, sender, time.monotonic())
            self._step(self._accept, call)

    def close(self) -> None:
        """End what is open, have the engine stop, and wait for the threads."""
        self._admission.close()
        self._closing.set()
        for answer in tuple(self._open.values()):
            self._fail(answer, SHUTTING_DOWN)  # first: what the stub says of the cancelled is not for their clients
            self._link.cancel(answer.key)
        self._lanes.close()
        for call in self._room.guests():
            self._give_up(call, SHUTTING_DOWN)
        self._room.close(5.0)
        self._ended.put(None)
        self._link.close()
        self._senders.close()

    def _step(self, step: Callable[[ForwardedRequest], bool], call: ForwardedRequest) -> None:
        """Do a step of a call, which says whether another thread goes on with it; if it fails, the client is told."""
        try:
            if step(call):
                return
        except BaseException as error:
            self._refuse(call, failure_of(error))
        self._admission.leave(1)

    def _refuse(self, call: ForwardedRequest, failure: Failure) -> None:
        """End a request that the engine was not given."""
        if failure.outcome == "refused":
            with contextlib.suppress(RequestError):
                log_request(self._name, client_id(call.request), "refused", error=failure.message)
        self._responder.refuse(call.sender, failure)

    def _give_up(
        self, call: ForwardedRequest, failure: Failure, where: Callable[[ForwardedRequest], bool] = lambda call: True
    ) -> None:
        """End a call that waits for a thread, unless one has begun with it or ``where`` does not hold."""
        if self._room.take_out(call, where):
            self._refuse(call, failure)
            self._admission.leave(1)

    def _accept(self, call: ForwardedRequest) -> bool:
        call.limit = timeout_s(call.request, read_parameters(call.request))
        self._room.put(call, partial(self._step, self._begin, call))
        return True

    def _begin(self, call: ForwardedRequest) -> bool:
        if call.sender.is_cancelled():
            raise FailedError(CANCELLED)
        _engine_parameters(call)
        self._read(call)
        if self._lanes.take(num_text_bytes(call.texts), partial(self._step, self._encode, call)):
            return True
        return self._ask(self._preprocessor.run(call.texts), call)

    def _encode(self, call: ForwardedRequest) -> bool:
        """In a thread for long texts."""
        if call.sender.is_cancelled():
            raise FailedError(CANCELLED)
        _engine_parameters(call)
        encoded = self._preprocessor.run(call.texts)
        self._room.put(call, partial(self._step, partial(self._ask, encoded), call))
        return True

    def _ask(self, encoded: dict[str, np.ndarray], asked: ForwardedRequest) -> bool:
        """Have the engine answer; False, because the call is over then."""
        request, parameters = asked.request, _engine_parameters(asked)
        interval = stream_interval(read_parameters(request), self._stream_interval)
        parameters[STREAM_INTERVAL] = interval
        answer = Answer(self._keys.make(), asked.sender, self._tokenizer, interval, self._accumulate)
        outputs = frozenset(request.requested_output_names()) - {TEXT_OUTPUT}
        call = self._pb.InferenceRequest(
            model_name=ENGINE_MODEL,
            request_id=client_id(request),
            inputs=self._engine_inputs(encoded, asked.arrays, answer.key),
            requested_output_names=[*NEEDED, *sorted(outputs)],
            parameters=parameters,
        )
        self._link.connect()
        self._open[answer.key] = answer
        responses: Any = ()
        try:
            if self._closing.is_set():  # `close` may have looked for open answers before
                raise FailedError(SHUTTING_DOWN)
            responses = call.exec(decoupled=True)
            for response in responses:
                failure = self._failure_in(response)
                if failure is not None:
                    # The engine was given what is left of the limit.
                    late = asked.limit is not None and failure.outcome == "deadline"
                    self._fail(answer, past_deadline(asked.limit or 0.0) if late else failure)
            if not answer.complete.wait(LATE_S):
                self._fail(answer, Failure("failed", "the engine ended the request without an answer; send it again"))
        except BaseException as error:
            self._link.cancel(answer.key)
            self._fail(answer, failure_of(error))
            for _ in responses:  # Triton forgets the call only when its last response was taken
                pass
        self._ended.put((time.monotonic(), responses))
        answer.ended.wait()
        return False

    def _failure_in(self, response: Any) -> Failure | None:
        """What a response of `tensorrt_llm` says went wrong."""
        if response.has_error():
            return self._failure(response.error())
        tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
        if FINISH_REASON not in tensors or tensors[FINISH_REASON].as_numpy().item() != ERROR.encode():
            return None
        return Failure.from_json(json.loads(tensors[STOP_REASON].as_numpy().item()))

    def _let_go(self) -> None:
        """Drop the responses of ended calls, oldest first."""
        while (ended := self._ended.get()) is not None:
            time.sleep(max(0.0, ended[0] + LINGER_S - time.monotonic()))
            del ended

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_PERIOD_S):
            try:
                self._look()
            except BaseException:
                logger.exception("looking after the open requests failed")

    def _look(self) -> None:
        now = time.monotonic()
        over = self._drain.look(now)
        if self._drain.asked:
            self._admission.close()
        self._tell_open()
        waiting = self._room.guests()
        for call in waiting:
            if over:
                self._give_up(call, SHUTTING_DOWN)
            elif call.limit is not None and now - call.arrived >= call.limit:
                self._give_up(call, past_deadline(call.limit))
        self._look_for_clients(waiting, now)

    def _look_for_clients(self, waiting: list[ForwardedRequest], now: float) -> None:
        """End the requests of those that have gone: few looks at a time, in turn. Triton is asked only while the
        request cannot end: a question behind the last response crashes tritonserver."""
        asked: list[ForwardedRequest | Answer] = [*waiting, *self._open.copy().values()]
        for one in sorted(asked, key=lambda one: one.last_asked)[:MAX_LOOKS]:
            one.last_asked = now
            if isinstance(one, ForwardedRequest):
                self._give_up(one, CANCELLED, where=lambda call: call.sender.is_cancelled())
                continue
            with one.lock:
                cancelled = not one.ended.is_set() and one.sender.is_cancelled()
            if cancelled:
                self._link.cancel(one.key)

    def _tell_open(self) -> None:
        """The stub counts what waits here too: a drain ends when nothing is open any more."""
        num_open = self._admission.num_open
        if num_open != self._told_open:
            with contextlib.suppress(EngineError):
                self._link.tell_open(num_open)
                self._told_open = num_open

    # -- what the stub says (on the link's thread) --------------------------------------------------------------

    def _on_rows(self, rows: list[TextRow]) -> None:
        answers = {}
        for row in rows:
            answer = self._open.get(row.key)
            if answer is not None:
                answer.add(row)
                answers[row.key] = answer
        for answer in answers.values():
            self._senders.schedule(answer)

    def _on_lost(self) -> None:
        self._told_open = 0
        for answer in tuple(self._open.values()):
            self._fail(answer, Failure("lost", "tensorrt_llm has ended; send the request again"))

    def _fail(self, answer: Answer, failure: Failure) -> None:
        answer.fail(failure)
        self._senders.schedule(answer)

    # -- responses (on the sender threads) ----------------------------------------------------------------------

    def _send(self, answer: Answer) -> None:
        try:
            for piece in islice(answer.pieces(), MAX_PIECES):
                tensors = [self._pb.Tensor(TEXT_OUTPUT, np.array([piece.text], dtype=np.object_))]
                tensors += [self._pb.Tensor(name, array) for name, array in piece.arrays.items()]
                check_room(sum(array.nbytes for array in piece.arrays.values()))
                flags = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if piece.final else 0
                with answer.lock:
                    if answer.ended.is_set():
                        return
                    answer.sender.send(self._pb.InferenceResponse(tensors), flags=flags)
                    if piece.final:
                        self._is_over(answer)
                self._senders.goes_on()
            if answer.waits:
                self._senders.schedule(answer)
            failure = answer.take_failure()
        except BaseException as error:
            self._link.cancel(answer.key)
            failure = failure_of(error)
        with answer.lock:
            if failure is not None and not answer.ended.is_set():
                self._is_over(answer)
                self._responder.refuse(answer.sender, failure)

    def _is_over(self, answer: Answer) -> None:
        self._open.pop(answer.key, None)
        answer.ended.set()
        answer.complete.set()

    def _read(self, call: ForwardedRequest) -> None:
        """The request's inputs: those for preprocessing, and those for `tensorrt_llm`. Raises RequestError."""
        check_parameters(read_parameters(call.request), TEXT_INPUTS, own=(STREAM_INTERVAL,))
        found = {name: self._pb.get_input_tensor_by_name(call.request, name) for name in self._inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}
        for name in NOT_OFFERED:
            if name in arrays:
                refuse_unsupported(name, arrays.pop(name))
        call.texts = {TO_PREPROCESSING[name]: arrays.pop(name) for name in tuple(arrays) if name in TO_PREPROCESSING}
        call.arrays = arrays

    def _engine_inputs(self, encoded: dict[str, np.ndarray], arrays: dict[str, np.ndarray], key: int) -> list[Any]:
        """Input tensors of `tensorrt_llm`, one row for each prompt."""
        engine = {
            FROM_PREPROCESSING[name]: array
            for name, array in encoded.items()
            if name in FROM_PREPROCESSING and array.size
        }
        engine |= {TO_ENGINE.get(name, name): array for name, array in arrays.items()}
        engine[STREAM_KEY] = np.full((len(engine["input_ids"]), 1), key, dtype=np.int64)
        return [self._pb.Tensor(name, array) for name, array in engine.items()]

    def _failure(self, error: Any) -> Failure:
        """Of an error of Triton's own: the stub's come as tensors."""
        outcomes = {getattr(self._pb.TritonError, CODES[name]): name for name in ("refused", "unavailable", "failed")}
        return Failure(outcomes.get(error.code(), "failed"), error.message())


def _engine_parameters(call: ForwardedRequest) -> dict[str, Any]:
    """The deadline is of the whole request, the wait for a thread included. Raises FailedError when it has passed."""
    if call.limit is None:
        return {ERRORS_AS_TENSORS: True}
    waited_s = time.monotonic() - call.arrived
    if waited_s >= call.limit:
        raise FailedError(past_deadline(call.limit))
    return {ERRORS_AS_TENSORS: True, TIMEOUT: max(1, round((call.limit - waited_s) * 1e6))}
