"""The `tensorrt_llm` model: a thin stub between Triton and the engine process."""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvforge.common.errors import EngineError, KvforgeError, RequestError, first_line, let_end, refusal_of
from kvforge.common.refusals import GUIDES_FULL, Refusal
from kvforge.serving.contract.failures import (
    CANCELLED,
    COMPLETED,
    SHUTTING_DOWN,
    FailedError,
    Failure,
    UnavailableError,
    failed,
    failure_of,
    past_deadline,
)
from kvforge.serving.contract.inputs import with_todays_names
from kvforge.serving.contract.parameters import (
    KEEP_END_TOKEN,
    check_parameters,
    client_id,
    draft_scope,
    flag,
    read_parameters,
    stop_token_ids,
    stream_interval,
    timeout_s,
    wants_errors_as_tensors,
)
from kvforge.serving.contract.request import check_one_response, is_stop, parse_batch, wrap_token_ids
from kvforge.serving.contract.size_limits import SizeLimits
from kvforge.serving.contract.stream_keys import STREAM_KEY, StreamKeys, lane_of
from kvforge.serving.contract.text_rows import RowMessage, socket_path
from kvforge.serving.engine.guide_thread import GUIDE
from kvforge.serving.engine.output_rows import StepOutput
from kvforge.serving.engine.protocol import METERED
from kvforge.serving.logs.request_log import log_request
from kvforge.serving.processes.facts import server_of_stub
from kvforge.serving.processes.state_files import StateWriter
from kvforge.serving.stub.active import ActiveRequest
from kvforge.serving.stub.admission import Admission
from kvforge.serving.stub.config import StubConfig
from kvforge.serving.stub.end_log import log_end
from kvforge.serving.stub.engine_client import EngineClient
from kvforge.serving.stub.guide_desk import GuideDesk, Verdicts
from kvforge.serving.stub.metrics import EngineMetrics
from kvforge.serving.stub.open_requests import OpenRequests
from kvforge.serving.stub.request_watch import RequestWatch
from kvforge.serving.stub.responder import Responder
from kvforge.serving.stub.responses import add_row, chunk_arrays, failure_arrays
from kvforge.serving.stub.sender_pool import SenderPool
from kvforge.serving.stub.text_links import TextLinks
from kvforge.serving.triton_config import begin_model
from kvforge.workers import WorkersBusy

logger = logging.getLogger("kvforge.serving")


class Stub:
    """What `triton_repo/tensorrt_llm/1/model.py` calls. `pb` is triton_python_backend_utils."""

    def __init__(self, pb: Any, args: dict[str, str]) -> None:
        """Start the engine and wait until it is loaded. Raises EngineError with the engine's message."""
        triton = self._triton = begin_model(args)  # first: metrics already wait for the server's answer
        self._pb = pb
        config = self._config = StubConfig.of(triton)
        self._limits = SizeLimits(triton.options.max_request_bytes, config.vocab_size, config.max_seq_len)
        self._keys = StreamKeys(triton.run_dir)
        self._requests = OpenRequests()
        self._admission = Admission(triton.options.max_queue_size)
        self._responder = Responder(pb)
        self._metrics = EngineMetrics(pb, triton.name, triton.version, config.kv_policy)
        self._state = StateWriter(triton.run_dir)
        self._senders: SenderPool[ActiveRequest] = SenderPool(self._send)
        self._link_lock = threading.Lock()
        self._links = TextLinks(socket_path(triton.run_dir), self.on_client_gone, self.on_text_model_gone)
        self._guides = GuideDesk(config.tokenizer_dir, config.eos_token_ids, config.python)
        self._client = EngineClient([*config.engine_command, "--server-pid", str(server_of_stub())], self)
        self._watch = RequestWatch(self, self._requests, config.poll_s, triton.run_dir)  # it says that the engine loads
        self._client.start()
        self._guides.wait_started()

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; every one gets its responses, FINAL or an error included, from the sender threads."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except RequestError as error:
                self._refuse(request, sender, failed("refused", error.refusal))
            except (EngineError, FailedError) as error:
                self._refuse(request, sender, _unavailable(error))
            except BaseException as error:
                let_end(error)
                logger.exception("a request could not be read")
                self._refuse(request, sender, Failure("failed", f"the request could not be read: {first_line(error)}"))

    def finalize(self) -> None:
        """Answer what is open with an error, stop the engine, join the threads."""
        self.on_drain()
        for active in self._requests.all():
            self._fail(active, SHUTTING_DOWN)
        self._watch.close()
        self._client.close()
        self._guides.close()
        self._senders.close()
        self._links.close()
        self._metrics.close()

    # -- requests -----------------------------------------------------------------------------------------

    def _accept(self, request: Any, sender: Any) -> None:
        tensors = {}
        for name in self._triton.inputs:
            tensor = self._pb.get_input_tensor_by_name(request, name)
            if tensor is not None:
                tensors[name] = tensor.as_numpy()
        if is_stop(tensors):
            if not client_id(request):
                raise RequestError("'stop' ends the request of the same id", "give both requests an id")
            for active in self._requests.with_client_id(client_id(request)):
                self._stop(active)
            self._responder.acknowledge(sender, self._triton.decoupled)
            return
        active = self._read(request, sender, with_todays_names(tensors))
        guides = [prompt.params.get("guided_decoding") for prompt in active.prompts]
        self._enter(active)
        try:
            if any(guides):
                self._guides.ask(guides, partial(self._on_verdicts, active))
            else:
                self._send_all(active, guides)
        except BaseException as error:
            self._give_up(active, error)
        if active.lane is not None:
            self._senders.schedule(active)

    def _enter(self, active: ActiveRequest) -> None:
        """Count it as open. Raises UnavailableError and RequestError."""
        self._admission.enter(len(active.sequences), was_let_in=active.lane is not None)
        try:
            self._requests.add(active)
        except RequestError:
            self._admission.leave(len(active.sequences))
            raise

    def _send_all(self, active: ActiveRequest, guides: Sequence[dict[str, Any] | None]) -> None:
        for message in _messages(active, guides):
            self._client.send(message)

    def _give_up(self, active: ActiveRequest, error: BaseException) -> None:
        """End an open request that cannot be sent on. What else ends it at this moment does it in the same way, and so
        there is one end."""
        if isinstance(error, EngineError | FailedError):
            failure = _unavailable(error)
        else:
            failure = failure_of(error)
            if not isinstance(error, RequestError):
                let_end(error)
                logger.error("a request could not be sent on", exc_info=error)
        self.end(active, failure)

    def _on_verdicts(self, active: ActiveRequest, verdicts: Verdicts | KvforgeError) -> None:
        """Its guides have been judged (on a thread of the judge's, or at once)."""
        if self._requests.by_key(active.key) is not active:
            return  # it was cancelled meanwhile
        try:
            if isinstance(verdicts, KvforgeError):
                code = GUIDES_FULL if isinstance(verdicts, WorkersBusy) else None
                raise UnavailableError(
                    Refusal(f"guided decoding is not available: {refusal_of(verdicts).reason}", code=code)
                )
            for verdict in verdicts:
                if verdict is not None:
                    verdict.accepted()
            self._send_all(active, [None if v is None else v.to_json() for v in verdicts])
        except BaseException as error:
            self._give_up(active, error)

    def _read(self, request: Any, sender: Any, tensors: dict[str, np.ndarray]) -> ActiveRequest:
        """Raises RequestError for a request that cannot be served as asked."""
        parameters = read_parameters(request)
        key = self._keys.read(tensors.pop(STREAM_KEY, None))
        lane = None if key is None else lane_of(key)
        if lane is None:
            check_parameters(parameters, self._triton.inputs)
        elif not self._links.has(lane):
            raise UnavailableError(
                Refusal("the text model has no connection to tensorrt_llm", "send the request again")
            )
        self._limits.check_tensors(tensors)
        if self._triton.options.wrap_token_ids and self._config.vocab_size:
            tensors = wrap_token_ids(tensors, self._config.vocab_size)
        end_id = next(iter(self._config.eos_token_ids), None)
        prompts = parse_batch(tensors, self._config.exclude_input, stop_token_ids(parameters), end_id)
        if scope := draft_scope(parameters):
            for prompt in prompts:
                prompt.params["draft_scope"] = scope
        self._limits.check_logits(prompts)
        if not self._triton.decoupled:
            check_one_response(prompts)
        return ActiveRequest(
            secrets.randbits(62) if key is None else key,
            client_id(request),
            sender,
            prompts,
            frozenset(request.requested_output_names()),
            lane=lane,
            errors_as_tensors=wants_errors_as_tensors(request),
            timeout_s=timeout_s(request, parameters),
            stream_interval=stream_interval(parameters, self._triton.options.stream_interval),
            keeps_end=flag(parameters, KEEP_END_TOKEN, False),
        )

    def _refuse(self, request: Any, sender: Any, failure: Failure) -> None:
        self._metrics.count(failure.outcome)
        log_request("tensorrt_llm", _id_to_log(request), failure.outcome, error=failure.message)
        if wants_errors_as_tensors(request):
            self._responder.end(sender, failure_arrays(frozenset(request.requested_output_names()), failure))
        else:
            self._responder.refuse(sender, failure)

    def _forget(self, active: ActiveRequest) -> None:
        if self._requests.remove(active):
            self._admission.leave(len(active.sequences))

    def _fail(self, active: ActiveRequest, failure: Failure) -> None:
        active.fail(failure)
        self._senders.schedule(active)

    # -- what the engine reports (on the client's reader thread) --------------------------------------------

    def on_tokens(self, outputs: list[StepOutput]) -> None:
        linked: dict[int, ActiveRequest] = {}
        for output in outputs:
            active = self._requests.by_engine_id(output.engine_id)
            try:
                if not self._take(output, active) or active is None:
                    continue
                if active.lane is None:
                    self._senders.schedule(active)
                else:
                    linked[active.key] = active
            except BaseException as error:
                let_end(error)
                logger.exception("a step's outputs could not be taken in")
                if active is not None:
                    self.end(active, Failure("failed", f"the engine's answer could not be read: {first_line(error)}"))
        if linked:
            self._send_rows(linked.values())

    def _take(self, output: StepOutput, active: ActiveRequest | None) -> bool:
        """True where there is something to send now."""
        if active is None:
            # Nobody waits for it: cancelled a moment ago, or it outlived a restart of the engine.
            if output.finish_reason is None:
                self._client.abort(output.engine_id)
        elif output.finish_reason == "abort" and active.timeout_s is not None:
            self.end(active, past_deadline(active.timeout_s))
        elif output.finish_reason in ("error", "abort"):
            self.end(
                active, Failure("failed", f"the engine gave up this request: {output.stop_reason}", output.refusal)
            )
        else:
            return active.add(output)
        return False

    def on_refused(self, request_id: str, refusal: Refusal) -> None:
        active = self._requests.by_engine_id(request_id)
        if active is not None:
            self.end(active, failed("refused", refusal))

    def on_stats(self, stats: dict) -> None:
        self._admission.max_num_seqs = stats["max_num_seqs"]
        self._metrics.update(stats)

    def on_lost(self, error: str) -> None:
        self._metrics.engine_ended()
        for active in self._requests.all():
            self._fail(active, Failure("lost", error))

    # -- what text models and the watch report ---------------------------------------------------------------

    def on_client_gone(self, key: int) -> None:
        """The client of a text model's request has gone."""
        active = self._requests.by_key(key)
        if active is not None and active.lane is not None:
            self.end(active, CANCELLED)

    def on_text_model_gone(self, lane: int) -> None:
        for active in self._requests.all():
            if active.lane == lane:
                self.end(active, CANCELLED)

    def on_drain(self) -> None:
        """Take no new requests."""
        self._admission.close()

    def on_tick(self) -> None:
        closed = self._admission.closed  # before the requests are counted: none comes in after that
        requests = self._requests.all()
        linked = Counter(active.lane for active in requests if active.lane is not None)
        num_open = len(requests) - linked.total() + self._links.num_open(linked)
        num_open = max(num_open, min(self._admission.num_open, 1))  # one may be on its way in
        self._metrics.set_open(num_open, self._client.state)
        self._state.write(self._client.state, self._client.pid, num_open, closed, self._client.failure)

    def end(self, active: ActiveRequest, failure: Failure) -> None:
        """End a request early: an error for its client, an abort for the engine. Idempotent."""
        self._abort(active)
        self._fail(active, failure)

    def _stop(self, active: ActiveRequest) -> None:
        """End a request early: for its client with what there is, for the engine with an abort. Idempotent."""
        self._abort(active)
        active.stop()
        self._senders.schedule(active)

    def _abort(self, active: ActiveRequest) -> None:
        for engine_id in active.engine_ids:
            self._client.abort(engine_id)

    # -- responses (on the sender threads, rows on the client's reader thread too) ------------------------------

    def _send(self, active: ActiveRequest) -> None:
        """What a request's client is to get now: tokens, or its end."""
        try:
            if active.lane is not None:
                if self._triton.decoupled and not active.was_greeted:
                    active.was_greeted = True
                    self._responder.respond(active, {}, False)
                self._send_rows([active])
            else:
                for chunk in active.take():
                    if active.has_failed:  # such as that its client has gone: nothing more but its end
                        break
                    self._responder.respond(active, chunk_arrays(active, chunk), chunk.final)
                    self._senders.goes_on()
                    if chunk.final:
                        self._complete(active)
        except BaseException as error:
            self._break_off(active, error)
        if (failure := active.take_failure()) is not None:
            self._send_failure(active, failure)
        elif active.has_left and self._responder.close(active, self._triton.decoupled):
            self._complete(active)

    def _send_rows(self, requests: Iterable[ActiveRequest]) -> None:
        """Hand the tokens of requests to their text models, in one message for each model."""
        ended = []
        with self._link_lock:  # two threads may have rows of one request
            messages: dict[int, RowMessage] = {}
            for active in requests:
                assert active.lane is not None
                message = messages.setdefault(active.lane, RowMessage())
                try:
                    for chunk in active.take():
                        add_row(message, active, chunk)
                        if chunk.final:
                            ended.append(active)
                except BaseException as error:
                    self._break_off(active, error)
                    ended.append(active)
            for lane, message in messages.items():
                if message.rows:
                    self._links.send(lane, message)
        for active in ended:  # behind its rows
            active.has_left = True
            self._senders.schedule(active)

    def _break_off(self, active: ActiveRequest, error: BaseException) -> None:
        let_end(error)
        logger.error("a response could not be sent: %s", error)
        self._abort(active)
        active.break_off(Failure("failed", f"a response could not be sent: {first_line(error)}"))

    def _complete(self, active: ActiveRequest) -> None:
        self._forget(active)
        self._metrics.answered([len(p.prompt) for p in active.prompts], [s.num_sent for s in active.sequences])
        self._ended(active, CANCELLED.outcome if active.was_stopped else COMPLETED)

    def _send_failure(self, active: ActiveRequest, failure: Failure) -> None:
        """The end of a request that failed. A response that is no error follows where the caller asked for that."""
        self._forget(active)
        if active.errors_as_tensors:
            try:
                self._responder.respond(active, failure_arrays(active.outputs, failure), True)
            except BaseException as error:
                let_end(error)
                logger.error("an error could not be sent: %s", error)
        else:
            self._responder.fail(active, failure)
        self._ended(active, failure.outcome, failure.message)

    def _ended(self, active: ActiveRequest, outcome: str, error: str | None = None) -> None:
        self._metrics.count(outcome)
        log_end(active, outcome, time.monotonic(), error)


def _messages(active: ActiveRequest, guides: Sequence[dict[str, Any] | None]) -> list[bytes]:
    """An `add` for each prompt, with its guide's verdict. Raises RequestError when one is too large."""
    messages = []
    for engine_id, prompt, guide in zip(active.engine_ids, active.prompts, guides, strict=True):
        message: dict[str, Any] = {"op": "add", "id": engine_id, "prompt": prompt.prompt, "params": prompt.params}
        if guide is not None:
            message[GUIDE] = guide
        if prompt.streaming and prompt.return_perf_metrics:
            message[METERED] = True
        messages.append(EngineClient.encode(message))
    return messages


def _unavailable(error: EngineError | FailedError) -> Failure:
    return error.failure if isinstance(error, FailedError) else Failure("unavailable", str(error))


def _id_to_log(request: Any) -> str:
    try:
        return client_id(request)
    except RequestError:
        return ""
