"""The `tensorrt_llm_bls` model: text to text by business logic scripting, Triton's calls from one model to another.

Text models run in this process; only `tensorrt_llm` is called, one thread per open request waiting for its next
response. Long texts are tokenized in threads of their own (lanes.py), before the request takes one of these. Each
response is acknowledged as postprocessing would (stub/acks.py), so tokens gather while a response is on its way, and
the empty responses that come now and then show when a client has gone.

An error behind a response never arrives at such a caller: Triton waits for ever, or loses it. So the stub is asked for
errors as tensors (parameters.ERRORS_AS_TENSORS).
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvforge.common.errors import EngineError
from kvforge.serving.contract.failures import CANCELLED, CODES, Failure, failure_of, past_deadline
from kvforge.serving.contract.inputs import TEXT_INPUTS, refuse_unsupported
from kvforge.serving.contract.parameters import (
    ERRORS_AS_TENSORS,
    TIMEOUT,
    check_parameters,
    client_id,
    read_parameters,
    timeout_s,
)
from kvforge.serving.contract.response_fields import ERROR, FINISH_REASON, STOP_REASON, STREAM_STATE
from kvforge.serving.contract.stream_keys import STREAM_KEY
from kvforge.serving.stub.acks import AckSender
from kvforge.serving.stub.admission import Admission, UnavailableError
from kvforge.serving.stub.responder import Responder
from kvforge.serving.text_models.lanes import TextLanes
from kvforge.serving.text_models.postprocess import make_postprocessor
from kvforge.serving.text_models.preprocess import make_preprocessor, num_text_bytes

ENGINE_MODEL = "tensorrt_llm"
TEXT_OUTPUT = "text_output"
LANE = 1
MAX_THREADS, SPARE_THREADS = 256, 32
WATCH_PERIOD_S, MAX_LOOKS = 0.05, 10
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
    "STREAM_KEY": STREAM_KEY,
}
NOT_OFFERED = (
    "num_draft_tokens", "use_draft_logits", "image_input", "image_bytes_input", "image_url_input", "video_bytes_input"
)  # fmt: skip
TO_ENGINE = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty", "stream": "streaming"}
NEEDED = ("output_ids", "sequence_length", STREAM_STATE, FINISH_REASON, STOP_REASON)


class FailedError(Exception):
    """A request ends with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass
class Call:
    """One request on its way: when it came, its deadline, and its inputs once they were read."""

    request: Any
    sender: Any
    arrived: float
    limit: float | None = None
    texts: dict[str, np.ndarray] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Asked:
    """A request that the engine works on. `lock` is held in calls on `sender`: Triton crashes on a question about a
    request that is over."""

    sender: Any
    looked: float = 0.0
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class TextServer:
    """What `triton_repo/tensorrt_llm_bls/1/model.py` calls. `pb` is triton_python_backend_utils."""

    def __init__(self, pb: Any, args: dict[str, str]) -> None:
        """Raises EngineError when the engine has no tokenizer."""
        self._pb = pb
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._inputs = [tensor["name"] for tensor in config["input"]]
        self._accumulate = parameters["accumulate_tokens"].lower() == "true"
        self._preprocessor = make_preprocessor(parameters, LANE)
        self._postprocessor = make_postprocessor(parameters)
        self._acks = AckSender(parameters["ack_socket"])
        self._responder = Responder(pb)
        max_queue_size = int(parameters["max_queue_size"])
        self._admission = Admission(max_queue_size)
        self._admission.max_num_seqs = config["max_batch_size"]
        # More than run at once, so that the engine's own queue is never empty while requests wait here.
        num_threads = min(config["max_batch_size"] + min(max_queue_size, SPARE_THREADS), MAX_THREADS)
        self._open: dict[int, Asked] = {}
        self._ended: queue.SimpleQueue[tuple[float, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._let_go, name="bls-ended", daemon=True).start()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bls")
        self._lanes = TextLanes()
        self._closing = threading.Event()
        if not config["model_transaction_policy"]["decoupled"]:  # then no empty responses come by which to look
            threading.Thread(target=self._watch, name="bls-watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; each gets its responses from a thread of the pool."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._admission.enter(1)
            except UnavailableError as error:
                self._responder.refuse(sender, Failure("unavailable", str(error)))
                continue
            self._pool.submit(self._step, self._begin, Call(request, sender, time.monotonic()))

    def close(self) -> None:
        """Cancel what runs and wait for the threads."""
        self._admission.close()
        self._closing.set()
        for key in tuple(self._open):
            self._acks.send(key, True)
        self._lanes.close()
        closing = threading.Thread(target=self._pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        closing.start()
        closing.join(timeout=5.0)
        self._ended.put(None)
        self._acks.close()

    def _step(self, step: Callable[[Call], bool], call: Call) -> None:
        """Do a step of a call, which says whether another thread goes on with it; if it fails, the client is told."""
        try:
            if step(call):
                return
        except FailedError as error:
            # The engine was given what is left of the limit.
            late = call.limit is not None and error.failure.outcome == "deadline"
            self._responder.refuse(call.sender, past_deadline(call.limit or 0.0) if late else error.failure)
        except UnavailableError as error:
            self._responder.refuse(call.sender, Failure("unavailable", str(error)))
        except BaseException as error:
            self._responder.refuse(call.sender, failure_of(error))
        self._admission.leave(1)

    def _begin(self, call: Call) -> bool:
        if call.sender.is_cancelled():
            raise FailedError(CANCELLED)
        call.limit = timeout_s(call.request, read_parameters(call.request))
        _engine_parameters(call)
        self._read(call)
        if self._lanes.take(num_text_bytes(call.texts), partial(self._step, self._encode, call)):
            return True
        return self._ask(self._preprocessor.run(call.texts), call)

    def _encode(self, call: Call) -> bool:
        """In a thread for long texts."""
        if call.sender.is_cancelled():
            raise FailedError(CANCELLED)
        _engine_parameters(call)
        encoded = self._preprocessor.run(call.texts)
        self._pool.submit(self._step, partial(self._ask, encoded), call)
        return True

    def _ask(self, encoded: dict[str, np.ndarray], asked: Call) -> bool:
        """Have the engine answer; False, because the call is over then."""
        request, sender, parameters = asked.request, asked.sender, _engine_parameters(asked)
        inputs, key = self._engine_inputs(encoded, asked.arrays)
        outputs = frozenset(request.requested_output_names())
        call = self._pb.InferenceRequest(
            model_name=ENGINE_MODEL,
            request_id=client_id(request),
            inputs=inputs,
            requested_output_names=[*NEEDED, *sorted(outputs - {TEXT_OUTPUT})],
            parameters=parameters,
        )
        watched = self._open[key] = Asked(sender)
        final = False
        responses = call.exec(decoupled=True)
        try:
            texts: dict[int, bytes] = {}
            for response in responses:
                final = self._pass_on(response, watched, outputs, texts, key) or final
            if not final:
                raise EngineError("the engine ended the request without an answer; send it again")
        except BaseException:
            self._acks.send(key, True)
            for _ in responses:  # Triton forgets the call only when its last response was taken
                pass
            raise
        finally:
            with watched.lock:
                self._open.pop(key, None)
                watched.is_over = True
            self._ended.put((time.monotonic(), responses))
        return False

    def _let_go(self) -> None:
        """Drop the responses of ended calls, oldest first."""
        while (ended := self._ended.get()) is not None:
            time.sleep(max(0.0, ended[0] + LINGER_S - time.monotonic()))
            del ended

    def _watch(self) -> None:
        """Tell the engine of clients that have gone: few looks at a time, in turn."""
        while not self._closing.wait(WATCH_PERIOD_S):
            for key, asked in sorted(self._open.copy().items(), key=lambda entry: entry[1].looked)[:MAX_LOOKS]:
                asked.looked = time.monotonic()
                with asked.lock:
                    cancelled = not asked.is_over and asked.sender.is_cancelled()
                if cancelled:
                    self._acks.send(key, True)

    def _pass_on(self, response: Any, asked: Asked, outputs: frozenset[str], texts: dict[int, bytes], key: int) -> bool:
        """Send one response of the engine to the client; True for the last one."""
        if response.has_error():
            raise FailedError(self._failure(response.error()))
        tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
        if not tensors:
            return False
        arrays = {name: tensors[name].as_numpy() for name in NEEDED if name in tensors}
        if FINISH_REASON in arrays and arrays[FINISH_REASON].item() == ERROR.encode():
            reason = json.loads(arrays[STOP_REASON].item())
            raise FailedError(Failure(reason["outcome"], reason["message"]))
        done = self._postprocessor.run(
            arrays["output_ids"], arrays["sequence_length"], arrays[STREAM_STATE], asked.sender.is_cancelled
        )
        if done.error is not None:
            raise FailedError(Failure("failed", done.error))
        if done.text is not None:
            text = done.text
            if self._accumulate:
                texts[done.sequence] = texts.get(done.sequence, b"") + text.item()
                text[0] = texts[done.sequence]
            passed = [tensor for name, tensor in tensors.items() if name in outputs]
            flags = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if done.final else 0
            answer = self._pb.InferenceResponse([self._pb.Tensor(TEXT_OUTPUT, text), *passed])
            with asked.lock:
                asked.is_over = done.final
                asked.sender.send(answer, flags=flags)
        self._acks.send(key, done.cancelled)
        return done.final

    def _read(self, call: Call) -> None:
        """The request's inputs: those for preprocessing, and those for `tensorrt_llm`. Raises RequestError."""
        check_parameters(read_parameters(call.request), TEXT_INPUTS, own=())
        found = {name: self._pb.get_input_tensor_by_name(call.request, name) for name in self._inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}
        for name in NOT_OFFERED:
            if name in arrays:
                refuse_unsupported(name, arrays.pop(name))
        call.texts = {TO_PREPROCESSING[name]: arrays.pop(name) for name in tuple(arrays) if name in TO_PREPROCESSING}
        call.arrays = arrays

    def _engine_inputs(self, encoded: dict[str, np.ndarray], arrays: dict[str, np.ndarray]) -> tuple[list[Any], int]:
        """Input tensors of `tensorrt_llm` and the stream key."""
        engine = {
            FROM_PREPROCESSING[name]: array
            for name, array in encoded.items()
            if name in FROM_PREPROCESSING and array.size
        }
        engine |= {TO_ENGINE.get(name, name): array for name, array in arrays.items()}
        return [self._pb.Tensor(name, array) for name, array in engine.items()], int(engine[STREAM_KEY][0, 0])

    def _failure(self, error: Any) -> Failure:
        """Of an error of Triton's own: the stub's come as tensors."""
        outcomes = {getattr(self._pb.TritonError, CODES[name]): name for name in ("refused", "unavailable", "failed")}
        return Failure(outcomes.get(error.code(), "failed"), error.message())


def _engine_parameters(call: Call) -> dict[str, Any]:
    """The deadline is of the whole request, the wait for a thread included. Raises FailedError when it has passed."""
    if call.limit is None:
        return {ERRORS_AS_TENSORS: True}
    waited_s = time.monotonic() - call.arrived
    if waited_s >= call.limit:
        raise FailedError(past_deadline(call.limit))
    return {ERRORS_AS_TENSORS: True, TIMEOUT: max(1, round((call.limit - waited_s) * 1e6))}
