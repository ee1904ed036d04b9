"""Requests larger than any limit: refused in a sentence, while another stream beside them goes on."""

import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from kvforge import LLM
from kvforge.serving.client import StreamingClient
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.cases import Case, Tensor
from tests.support.fuzz.known import KnownAnswers, tensor
from tests.support.fuzz.run import check_answer, check_errors, unharmed
from tests.support.fuzz.wire import Answer, Grpc, Http
from tests.support.serving.server import ENDLESS, ask

MIB = 2**20
IDS = (tensor("input_ids", "INT32", 5, 6, 7), tensor("input_lengths", "INT32", 3))
LENGTH = (tensor("request_output_len", "INT32", 4),)
TEXT = (tensor("text_input", "BYTES", b"hello"), tensor("max_tokens", "INT32", 4))


def zeros(name: str, datatype: str, *shape: int) -> Tensor:
    count = int(np.prod(shape))
    return Tensor(name, datatype, shape, (b"" if datatype == "BYTES" else 0,) * count)


@pytest.fixture(autouse=True)
def neighbour(server: TritonServer) -> Iterator[None]:
    """A stream that runs through every test; and the server is as it was before."""
    with unharmed(server), StreamingClient(server.grpc_url) as client:
        responses = client.generate("ensemble", ask("ensemble", "a neighbour", ENDLESS))
        next(responses)
        yield
        next(responses)


def refused(answer: Answer, words: str) -> None:
    check_errors(answer.errors, words)
    assert answer.ended
    assert any(re.search(words, error) for error in answer.errors), answer


CASES = {
    "prompt over max_seq_len": (
        Case("tensorrt_llm", (zeros("input_ids", "INT32", 1, 70000), tensor("input_lengths", "INT32", 70000), *LENGTH)),
        "the prompt has 70000 tokens, but the engine takes at most",
    ),
    "text over max_seq_len": (
        Case("ensemble", (tensor("text_input", "BYTES", b"a" * 70000), TEXT[1])),
        "the prompt has 70000 tokens, but the engine takes at most",
    ),
    "a million stop words": (Case("ensemble", (*TEXT, zeros("stop_words", "BYTES", 1, 1_000_000))), "words, but"),
    "a million stop tokens": (
        Case("tensorrt_llm", (*IDS, *LENGTH, zeros("stop_words_list", "INT32", 1, 2, 1_000_000))), ".",
    ),
    "20 MiB of tokens": (
        Case("tensorrt_llm", (zeros("input_ids", "INT32", 1, 5 * MIB), tensor("input_lengths", "INT32", 5), *LENGTH)),
        "bytes",
    ),
    "batch over max_batch_size": (
        Case("tensorrt_llm", (
            zeros("input_ids", "INT32", 5000, 1), zeros("input_lengths", "INT32", 5000, 1),
            zeros("request_output_len", "INT32", 5000, 1),
        )), "batch",
    ),
    "a bias over the vocabulary": (
        Case("tensorrt_llm", (*IDS, *LENGTH, zeros("embedding_bias", "FP32", 1, 99999))), "vocabulary has",
    ),
    "top of the sequences": (
        Case("tensorrt_llm", (*IDS, *LENGTH, tensor("num_return_sequences", "INT32", 2**31 - 1))),
        "num_return_sequences",
    ),
    "top of top-k": (Case("ensemble", (*TEXT, tensor("top_k", "INT32", -(2**31)))), "top_k"),
    "an end of no vocabulary": (Case("ensemble", (*TEXT, tensor("end_id", "INT32", 2**31 - 1))), "."),
    "minimum over maximum": (Case("ensemble", (*TEXT, tensor("min_tokens", "INT32", 2**31 - 1))), "min_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_grpc(server: TritonServer, name: str) -> None:
    case, words = CASES[name]
    connection = Grpc(server.grpc_url)
    refused(connection.stream(case), words)
    connection.close()


def test_a_large_message_over_grpc(server: TritonServer, full: bool) -> None:
    connection = Grpc(server.grpc_url)
    case = Case("ensemble", (tensor("text_input", "BYTES", b"a" * (300 if full else 40) * MIB), TEXT[1]))
    refused(connection.stream(case), ".")
    connection.close()


def test_a_large_body_over_http(server: TritonServer, full: bool) -> None:
    connection = Http(server.http_url)
    body = json.dumps({"text_input": "a" * (70 if full else 17) * MIB, "max_tokens": 4}).encode()
    refused(connection.generate(Case("ensemble", ()), body), ".")
    connection.close()


def test_the_most_tokens_a_request_may_ask_for(server: TritonServer) -> None:
    """2^31 - 1 is no reason for reserving anything: the request runs until it is cancelled."""
    with StreamingClient(server.grpc_url) as client:
        responses = client.generate("ensemble", ask("ensemble", "b", 2**31 - 1, end_id=-1))
        assert next(responses).tensors


def test_ids_that_are_no_text(server: TritonServer, llm: LLM) -> None:
    """The others of its batch are served."""
    known, connection, good = KnownAnswers(llm), Http(server.http_url), Grpc(server.grpc_url)
    rng = random.Random(0)
    for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        fields = {"text_input": "a", "max_tokens": 2, "input_ids": [5], "input_lengths": 1, "request_output_len": 2}
        names = ["text_input", "max_tokens"] if model != "tensorrt_llm" else list(fields)[2:]
        body = json.dumps({"id": "??", **{name: fields[name] for name in names}}).encode().replace(b"??", b"\xff\xfe")
        check_errors(connection.generate(Case(model, ()), body).errors, model)
        case = known.good(rng, "ensemble")
        check_answer(case, good.stream(case))
    connection.close()
    good.close()
