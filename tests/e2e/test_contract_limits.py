"""What a small server refuses: more requests than it may queue, requests that are too large, names that nobody knows;
deadlines; and the log line of each request."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.options import ServerOptions
from tests.support.serving.server import ENDLESS, ask, started, used_pages, wait_until

MODELS = ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"]
RUNNING, QUEUED = 2, 3
MAX_REQUEST_BYTES = 4000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limits") / "log.jsonl"


@pytest.fixture(scope="module")
def small(engine_dir: Path, log: Path) -> Iterator[TritonServer]:
    options = ServerOptions(
        kv_cache_gib=0.1, max_num_seqs=RUNNING, max_queue_size=QUEUED, max_request_bytes=MAX_REQUEST_BYTES,
        log_level="INFO", log_format="json", log_file=log,
    )  # fmt: skip
    with started(TritonServer(engine_dir, options)) as running:
        yield running


@pytest.fixture(autouse=True)
def quiet(small: TritonServer) -> Iterator[None]:
    yield
    wait_until(lambda: used_pages(small) == 0 and num_open(small) == 0, "a quiet server")


def num_open(server: TritonServer) -> int:
    state = server.state
    return state.active if state is not None else -1


def prompt(model: str) -> Any:
    return [5, 6, 7] if model == "tensorrt_llm" else "hello there"


def refusal(server: TritonServer, model: str, inputs: dict, request_id: str = "") -> str:
    with StreamingClient(server.grpc_url) as client, pytest.raises(KvforgeError) as caught:
        list(client.generate(model, inputs, request_id))
    return str(caught.value)


@pytest.mark.parametrize("model", MODELS)
def test_a_full_queue_is_an_error_at_once(small: TritonServer, model: str) -> None:
    with ExitStack() as stack:
        for _ in range(RUNNING + QUEUED):
            client = stack.enter_context(StreamingClient(small.grpc_url))
            client.generate(model, ask(model, prompt(model), ENDLESS))
        wait_until(lambda: num_open(small) == RUNNING + QUEUED, "all requests are accepted")
        message = refusal(small, model, ask(model, prompt(model), 4))
        assert "the queue is full: 5 sequences are running or waiting, and 2 may run and 3 wait" in message
        assert "Exceeds maximum queue size" in message and "Maximum queue size of 3 has been reached" in message
    wait_until(lambda: num_open(small) == 0, "all have ended")
    with StreamingClient(small.grpc_url) as client:
        assert list(client.generate(model, ask(model, prompt(model), 4)))[-1].final


def test_a_request_of_many_sequences_is_taken_when_nothing_else_runs(small: TritonServer) -> None:
    inputs = ask("ensemble", "hello there", 3, False, num_return_sequences=12, top_k=5)
    with StreamingClient(small.grpc_url) as client:
        assert len(list(client.generate("ensemble", inputs))) == 12


@pytest.mark.parametrize("model", MODELS)
def test_too_many_bytes(small: TritonServer, model: str) -> None:
    long = [5] * 2000 if model == "tensorrt_llm" else "a" * 5000
    assert f"at most {MAX_REQUEST_BYTES} are taken" in refusal(small, model, ask(model, long, 4))


def post(server: TritonServer, model: str, body: dict[str, Any]) -> tuple[int, str]:
    url = f"{server.http_url}/v2/models/{model}/generate"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=json.dumps(body).encode())) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


@pytest.mark.parametrize("model", MODELS)
def test_a_misspelt_name_is_refused_with_a_hint(small: TritonServer, model: str) -> None:
    body = ask(model, prompt(model), 4, False)
    assert post(small, model, {**body, "priority": 1, "id": "mine"})[0] == 200
    status, message = post(small, model, {**body, "temprature": 0.5})
    assert status == 400
    assert "'temprature' is no input of this model and no request parameter; did you mean 'temperature'?" in message


@pytest.mark.parametrize("model", MODELS)
def test_a_deadline_ends_a_request(small: TritonServer, model: str) -> None:
    body = {**ask(model, prompt(model), ENDLESS, False), "timeout": 300_000}
    status, message = post(small, model, body)
    assert status == 400
    assert "the request's deadline has passed: its timeout was 0.3 s" in message
    status, message = post(small, model, {**body, "timeout": -5})
    assert (status, "timeout" in message) == (400, True)


@pytest.mark.parametrize("key", [7, 2**62 - 1, -1])
def test_keys_of_the_text_models_cannot_be_made_up(small: TritonServer, key: int) -> None:
    assert "leave it out" in refusal(small, "tensorrt_llm", ask("tensorrt_llm", [5, 6], 4, stream_key=key))


def test_every_request_is_a_line_of_the_log(small: TritonServer, log: Path) -> None:
    with StreamingClient(small.grpc_url) as client:
        list(client.generate("ensemble", ask("ensemble", "hello there", 6), "fine"))
    refusal(small, "tensorrt_llm", ask("tensorrt_llm", [5], 0), "wrong")
    refusal(small, "ensemble", ask("ensemble", "", 4), "empty")

    def lines() -> dict[str, dict]:
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        return {entry["id"]: entry for entry in entries if entry.get("logger") == "kvforge.requests"}

    wait_until(lambda: {"fine", "wrong", "empty"} <= set(lines()), "the lines")
    fine = lines()["fine"]
    assert (fine["status"], fine["path"], fine["tokens_in"], fine["tokens_out"]) == ("completed", "text", 11, 6)
    assert 0 <= fine["queue_ms"] <= fine["ttft_ms"] <= fine["total_ms"]
    assert (lines()["wrong"]["status"], lines()["empty"]["model"]) == ("refused", "ensemble")
