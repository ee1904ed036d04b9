"""Thousands of good and broken gRPC requests from a seed: each is answered, and the good ones as offline."""

import random

import pytest

from kvforge import LLM
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.cases import Case
from tests.support.fuzz.known import KnownAnswers, fuzz_cases
from tests.support.fuzz.run import check_answer, check_errors, run_cases, unharmed
from tests.support.fuzz.wire import Grpc

SEED = 20


@pytest.fixture(scope="module")
def known(llm: LLM) -> KnownAnswers:
    return KnownAnswers(llm)


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls", "preprocessing", "postprocessing"])
def test_streams(server: TritonServer, known: KnownAnswers, full: bool, model: str) -> None:
    cases = fuzz_cases(server, known, model, f"{SEED}/stream", 2000 if full else 120)

    def send(connection: Grpc, case: Case, rng: random.Random) -> None:
        check_answer(case, connection.stream(case))

    with unharmed(server):
        run_cases(lambda: Grpc(server.grpc_url), send, cases, SEED)


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls", "preprocessing", "postprocessing"])
def test_unary(server: TritonServer, known: KnownAnswers, full: bool, model: str) -> None:
    """Decoupled models refuse it in a sentence; preprocessing and postprocessing answer."""
    cases = fuzz_cases(server, known, model, f"{SEED}/unary", 2000 if full else 120)

    def send(connection: Grpc, case: Case, rng: random.Random) -> int:
        answer = connection.unary(case)
        assert answer.ended
        check_errors(answer.errors, case)
        return not answer.errors

    with unharmed(server):
        answered = run_cases(lambda: Grpc(server.grpc_url), send, cases, SEED)
    assert any(answered) == (model in ("preprocessing", "postprocessing"))
