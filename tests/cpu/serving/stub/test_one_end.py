"""Every request of the stub has exactly one end, whatever ends it at the same moment: Triton crashes on a second."""

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvforge.common.errors import EngineError
from kvforge.serving.contract.failures import CANCELLED, SHUTTING_DOWN, past_deadline
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.contract.text_rows import REQUEST_END, RowMessage
from kvforge.serving.engine.output_rows import StepOutput
from kvforge.serving.stub.active import ActiveRequest
from kvforge.serving.stub.admission import Admission
from kvforge.serving.stub.open_requests import OpenRequests
from kvforge.serving.stub.request_watch import is_cancelled
from kvforge.serving.stub.responder import Responder
from kvforge.serving.stub.sender_pool import SenderPool
from kvforge.serving.stub.stub import Stub

FINAL = 1
OUTPUTS = frozenset({"output_ids"})


class Sender:
    """A response sender of Triton's that holds its callers to what they owe it."""

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        self.pause = pause
        self.ids: list[int] = []
        self.errors: list[Any] = []
        self.ends = 0
        self.misuse: list[str] = []

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.pause()
        if self.ends:
            self.misuse.append("a response behind the end")
        self.ends += flags == FINAL
        if response is not None:
            self.errors += [response.error] if response.error else []
            self.ids += [i for tensor in response.output_tensors for i in tensor.array.reshape(-1).tolist()]

    def is_cancelled(self) -> bool:
        if self.ends:
            self.misuse.append("a question behind the end")
        return False


class Links:
    """The text model's end: all rows that came, by request."""

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[int, list[int]]]] = {}

    def send(self, lane: int, rows: RowMessage) -> None:
        for key, _, flags, tokens, _, _ in rows.rows:
            self.rows.setdefault(key, []).append((flags, tokens))


PB = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    Tensor=lambda name, array: SimpleNamespace(name=name, array=array),
    InferenceResponse=lambda output_tensors, error=None: SimpleNamespace(output_tensors=output_tensors, error=error),
    TritonError=type(
        "TritonError",
        (),
        {"INTERNAL": 0, "UNAVAILABLE": 1, "CANCELLED": 2, "__init__": lambda self, message, code: None},
    ),
    get_input_tensor_by_name=lambda request, name: (
        SimpleNamespace(as_numpy=lambda: request.inputs[name]) if name in request.inputs else None
    ),
)


def make_stub(send: Callable[[bytes], None] = lambda message: None) -> Stub:
    """Without an engine and without a watch: tests play both."""
    stub = object.__new__(Stub)
    stub._pb, stub._requests, stub._responder = PB, OpenRequests(), Responder(PB)
    stub._triton = SimpleNamespace(decoupled=True, inputs=("stop",))  # type: ignore[assignment]
    stub._admission = Admission(1000)
    stub._metrics = SimpleNamespace(  # type: ignore[assignment]
        answered=lambda *a: None, count=lambda outcome: None, engine_ended=lambda: None
    )
    stub._link_lock, stub._links = threading.Lock(), Links()  # type: ignore[assignment]
    stub._client = SimpleNamespace(send=send, abort=lambda engine_id: None)  # type: ignore[assignment]
    stub._senders = SenderPool(stub._send)
    return stub


def make_active(key: int, sender: Sender, lane: int | None = None) -> ActiveRequest:
    prompts = [GenerationRequest([1], True, True)]
    return ActiveRequest(key, "", sender, prompts, OUTPUTS, lane=lane, errors_as_tensors=lane is not None)


def test_an_engine_lost_while_a_request_is_sent_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader ends all that are open, and the call that sends fails as well."""
    sender = Sender()

    def lose(message: bytes) -> None:
        stub.on_lost("the engine died")
        while not sender.ends:
            time.sleep(0.001)
        raise EngineError("the engine died")

    stub = make_stub(lose)
    active = make_active(1, sender)
    monkeypatch.setattr(Stub, "_read", lambda *arguments: active)
    stub.execute([SimpleNamespace(inputs={}, get_response_sender=lambda: sender, parameters=lambda: "",
                                  request_id=lambda: "")])  # fmt: skip
    is_cancelled(active)  # the watch may still hold it
    stub._senders.close()
    assert (sender.ends, sender.misuse, len(sender.errors)) == (1, [], 1)
    assert len(stub._requests) == stub._admission.num_open == 0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_ends_requests_at_once(seed: int) -> None:
    """Tokens by a reader, for clients and for a text model; cancellations, deadlines, stops, and questions by others;
    at last a drain."""
    rng = random.Random(seed)
    stub = make_stub()
    senders = [Sender(lambda: time.sleep(rng.choice((0, 0, 1e-4)))) for _ in range(12)]
    actives = [make_active(key, sender, 0 if key % 2 else None) for key, sender in enumerate(senders)]
    for active in actives:
        stub._enter(active)
    lengths = [rng.randrange(1, 60) for _ in actives]

    def read() -> None:
        own, sent = random.Random(seed), [0] * len(actives)
        while any(s < n for s, n in zip(sent, lengths, strict=True)):
            outputs = []
            for key, length in enumerate(lengths):
                if count := min(own.randrange(6), length - sent[key]):
                    tokens = list(range(sent[key], sent[key] + count))
                    sent[key] += count
                    reason = "length" if sent[key] == length and key != 0 else None
                    outputs.append(StepOutput(f"{key}.0", 0, tokens, reason))
            stub.on_tokens(outputs)
            time.sleep(1e-4)

    def disturb(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        for _ in range(10):
            active = own.choice(actives)
            what = own.randrange(4)
            if what == 0:
                stub.end(active, own.choice((CANCELLED, past_deadline(1.0))))
            elif what == 1:
                stub._stop(active)
            else:
                is_cancelled(active)
            time.sleep(own.choice((0, 1e-3)))

    threads = [threading.Thread(target=read), *(threading.Thread(target=disturb, args=(n,)) for n in range(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for active in actives:
        stub.end(active, SHUTTING_DOWN)
    stub._senders.close()
    assert len(stub._requests) == stub._admission.num_open == 0
    for active, sender, length in zip(actives, senders, lengths, strict=True):
        assert (sender.ends, sender.misuse) == (1, [])
        rows = stub._links.rows.get(active.key, [])  # type: ignore[attr-defined]
        is_text = active.lane is not None
        ids = [i for _, tokens in rows for i in tokens] if is_text else sender.ids
        has_failed = REQUEST_END not in [flags & REQUEST_END for flags, _ in rows] if is_text else bool(sender.errors)
        assert ids == list(range(len(ids))) and len(ids) <= length
        assert has_failed or active.was_stopped or len(ids) == length
        assert not any(flags & REQUEST_END for flags, _ in rows[:-1])
    assert np.all([not active.scheduled for active in actives])
