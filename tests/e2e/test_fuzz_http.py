"""Thousands of good and broken HTTP requests from a seed, and bytes that are none, on both ports."""

import math
import random
from dataclasses import replace

import pytest

from kvforge import LLM
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.bytes import break_body, garbage, throw
from tests.support.fuzz.cases import Case, Tensor
from tests.support.fuzz.known import KnownAnswers, fuzz_cases
from tests.support.fuzz.run import check_answer, check_errors, run_cases, unharmed
from tests.support.fuzz.wire import Grpc, Http, generate_json, infer_json

SEED = 21
BROKEN_BODIES = 0.4


@pytest.fixture(scope="module")
def known(llm: LLM) -> KnownAnswers:
    return KnownAnswers(llm)


def _countable(tensor: Tensor) -> bool:
    """Triton 2.51 itself dies of JSON tensors whose shape is larger than its memory: docs/security.md."""
    return abs(math.prod(tensor.shape)) < 2**28


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_generate(server: TritonServer, known: KnownAnswers, full: bool, model: str, stream: bool) -> None:
    cases = fuzz_cases(server, known, model, f"{SEED}/{stream}", 2500 if full else 100, stream)

    def send(connection: Http, case: Case, rng: random.Random) -> None:
        body = generate_json(case)
        if case.broken and rng.random() < BROKEN_BODIES:
            body = break_body(rng, body)
        if model == "tensorrt_llm":
            case = replace(case, expected=None)  # the text is what this client reads
        check_answer(case, connection.generate(case, body, stream))

    with unharmed(server):
        run_cases(lambda: Http(server.http_url), send, cases, SEED)


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing", "ensemble"])
def test_infer(server: TritonServer, known: KnownAnswers, full: bool, model: str) -> None:
    """KServe's own call, with tensors as JSON and as bytes behind it; decoupled models refuse it."""
    cases = fuzz_cases(server, known, model, f"{SEED}/infer", 3400 if full else 100)
    cases = [case for case in cases if all(_countable(tensor) for tensor in case.tensors)]

    def send(connection: Http, case: Case, rng: random.Random) -> bool:
        share = rng.choice([0.0, 0.5, 1.0])
        body, size = infer_json(case, [rng.random() < share for _ in case.tensors])
        if case.broken and rng.random() < BROKEN_BODIES:
            body = break_body(rng, body[:size]) + body[size:]
            size = rng.choice([size, size, 0, -1, len(body) + 1, 2**31])
        answer = connection.infer(case, body, size)
        check_errors(answer.errors, case)
        return not answer.errors

    with unharmed(server):
        answered = run_cases(lambda: Http(server.http_url), send, cases, SEED)
    assert any(answered) == (model != "ensemble")


@pytest.mark.parametrize("protocol", ["http", "grpc", "metrics"])
def test_bytes_that_are_no_request(server: TritonServer, known: KnownAnswers, full: bool, protocol: str) -> None:
    """Whatever arrives beside it, a good request is answered."""
    rng = random.Random(f"{SEED}/{protocol}")
    good = Grpc(server.grpc_url)
    with unharmed(server):
        for index in range(3400 if full else 40):
            received = throw(server.ports[protocol], garbage(rng))
            assert b"Traceback" not in received
            if index % 10 == 0:
                case = known.good(rng, "ensemble")
                check_answer(case, good.stream(case))
    good.close()
