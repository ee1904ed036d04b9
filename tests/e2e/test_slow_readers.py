"""Clients that stop reading in mid-stream: the others notice nothing, memory is bounded, and nothing is lost."""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from kvforge import LLM, SamplingParams
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.cases import Case
from tests.support.fuzz.known import KnownAnswers, tensor
from tests.support.fuzz.run import active_requests, check_answer, processes, unharmed
from tests.support.fuzz.wire import ANSWER_WITHIN_S, Answer, Grpc, generate_json, grpc_request, read_response
from tests.support.serving.server import wait_until

PROMPT = "a slow reader"
NUM_TOKENS = 1500
MOST_GROWTH_MIB = 128
"""Of all processes together, without the files they share with others: what waits for one slow reader is some hundred
bytes a response."""
PRIVATE = ("Pss_Anon:", "Pss_Shmem:")
Slow = tuple[Case, Iterator[Answer]]


@pytest.fixture(scope="module")
def whole(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return llm.generate([PROMPT], params, use_tqdm=False)[0]


def request_of(model: str, whole) -> Case:
    ids = whole.prompt_token_ids
    if model == "tensorrt_llm":
        inputs = (
            tensor("input_ids", "INT32", *ids), tensor("input_lengths", "INT32", len(ids)),
            tensor("request_output_len", "INT32", NUM_TOKENS), tensor("streaming", "BOOL", True),
        )  # fmt: skip
    else:
        text, tokens = tensor("text_input", "BYTES", PROMPT.encode()), tensor("max_tokens", "INT32", NUM_TOKENS)
        inputs = (text, tokens, tensor("stream", "BOOL", True))
    output = whole.outputs[0]
    expected = tuple(output.token_ids) if model == "tensorrt_llm" else output.text
    return Case(model, (*inputs, tensor("end_id", "INT32", -1)), expected)


@contextmanager
def slow_grpc(server: TritonServer, case: Case) -> Iterator[Iterator[None]]:
    """Reads nothing ahead of `next`."""
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.grpc_url, options=options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        yield stub.ModelStreamInfer(iter([grpc_request(case)]), timeout=ANSWER_WITHIN_S)


def read_grpc(case: Case, responses: Iterator, answer: Answer, limit: int | None = None) -> None:
    for count, response in enumerate(responses, start=1):
        if response.error_message:
            answer.errors.append(response.error_message)
        read_response(case.model, response.infer_response, answer)
        answer.ended = response.infer_response.parameters["triton_final_response"].bool_param
        if count == limit:
            return


@contextmanager
def slow_http(server: TritonServer, case: Case) -> Iterator[socket.socket]:
    body = generate_json(case)
    head = f"POST /v2/models/{case.model}/generate_stream HTTP/1.0\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(ANSWER_WITHIN_S)
        connection.connect(("127.0.0.1", server.ports["http"]))
        connection.sendall(head.encode() + body)
        yield connection


def read_http(case: Case, received: bytes, answer: Answer) -> None:
    for line in received.split(b"\n"):
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                answer.errors.append(event["error"])
            elif case.model == "ensemble":
                answer.text += event["text_output"]
            else:
                ids = event["output_ids"]
                answer.tokens += ids if isinstance(ids, list) else [ids]
    answer.ended = True


def resident_mib(server: TritonServer) -> float:
    total = 0.0
    for pid in processes(server):
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) / 1024 for line in file if line.startswith(PRIVATE))
    return total


def others_get_their_answers(server: TritonServer, known: KnownAnswers, seed: str) -> None:
    rng, connection = random.Random(seed), Grpc(server.grpc_url)
    for _ in range(10):
        case = known.good(rng, rng.choice(["ensemble", "tensorrt_llm"]))
        check_answer(case, connection.stream(case))
    connection.close()


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_slow_reader(server: TritonServer, llm: LLM, whole, model: str, protocol: str) -> None:
    case, answer, known = request_of(model, whole), Answer(), KnownAnswers(llm)
    slow = slow_grpc if protocol == "grpc" else slow_http
    with unharmed(server):
        before = resident_mib(server)
        with slow(server, case) as stream:
            head = stream.recv(100) if protocol == "http" else read_grpc(case, stream, answer, limit=1)
            others_get_their_answers(server, known, f"slow/{model}/{protocol}")
            # The engine does not wait for the reader: its pages are free again long before the stream ends.
            wait_until(lambda: active_requests(server) == 0, "the engine is done")
            assert resident_mib(server) - before < MOST_GROWTH_MIB
            if protocol == "grpc":
                read_grpc(case, stream, answer)
            else:
                read_http(case, head + b"".join(iter(lambda: stream.recv(65536), b"")), answer)
    check_answer(case, answer)
