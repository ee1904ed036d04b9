"""The OpenAI gateway under broken requests, garbage, vanishing clients and slow readers; and its API key."""

import contextlib
import http.client
import io
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.bytes import garbage, throw
from tests.support.fuzz.openai import broken_body, good_body
from tests.support.fuzz.run import active_requests, check_errors, run_cases, unharmed
from tests.support.fuzz.wire import ANSWER_WITHIN_S, Http
from tests.support.random_cases import Seeds
from tests.support.serving.gateway_process import Gateway, run_gateway
from tests.support.serving.server import wait_until

SEED = 23
PROMPTS = ["once", "a slow reader", "é and ü", "The secret number"]
SLOW_TOKENS = 1500
KEY = "sk-test-5f1c"
STREAMED = (b"data:", b"event:")
"""What an answer begins with that is a stream."""


@pytest.fixture(scope="module")
def gateway(server: TritonServer, engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with run_gateway(server, folder, write_timeout=600.0) as running:  # a slow reader may read nothing for long
        yield running


@pytest.fixture(scope="module")
def texts(llm: LLM) -> dict[str, str]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    return {str(output.prompt): output.outputs[0].text for output in outputs}


def check_error(content: bytes, about: object) -> None:
    """OpenAI's form of an error, or Anthropic's, in a sentence."""
    if content.startswith(STREAMED):
        events = [line.removeprefix(b"data: ") for line in content.split(b"\n") if line.startswith(b"data: ")]
        content = next((event for event in events if b'"error"' in event), b"")
    if content:
        error = json.loads(content)["error"]
        check_errors([error["message"]], about)
        assert "\n" not in error["message"], about


def test_fuzz(server: TritonServer, gateway: Gateway, texts: dict[str, str], seeds: Seeds) -> None:
    print(f"seed {SEED}")

    def send(connection: Http, index: int, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        good = good_body(prompt, 12)
        if rng.random() < 1 / 3:
            status, content = connection.post("/v1/completions", json.dumps(good).encode())
            assert status == 200, content
            assert json.loads(content)["choices"][0]["text"] == texts[prompt]
            return
        path, body = broken_body(rng, good)
        status, content = connection.post(f"/v1/{path}", body)
        assert status in (200, 400, 404, 413, 422), (body, status, content)
        if status != 200 or content.startswith(STREAMED):
            check_error(content if status != 200 or b'"error"' in content else b"", body)

    with unharmed(server):
        run_cases(lambda: Http(gateway.url), send, seeds(300, 10000), SEED)
    assert "Traceback" not in gateway.log.read_text()


@pytest.mark.parametrize("name", ["..", "../tiny", "..%2f..%2fetc%2fpasswd", "%2e%2e/tiny", "tiny%00", "a" * 3000])
def test_model_names_are_no_paths(gateway: Gateway, name: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=ANSWER_WITHIN_S)
    connection.request("GET", f"/v1/models/{name}")
    response = connection.getresponse()
    content = response.read()
    assert response.status in (400, 404)
    check_error(content, name)
    connection.request("POST", "/v1/completions", json.dumps({**good_body("a", 1), "model": name}))
    response = connection.getresponse()
    assert response.status == 404
    check_error(response.read(), name)
    connection.close()


def test_bytes_that_are_no_request(server: TritonServer, gateway: Gateway, texts: dict[str, str], full: bool) -> None:
    rng, connection = random.Random(SEED), Http(gateway.url)
    with unharmed(server):
        for _ in range(2000 if full else 40):
            data = garbage(rng).replace(b"/v2/models/ensemble/generate", b"/v1/completions")
            assert b"Traceback" not in throw(gateway.port, data)
        status, content = connection.post("/v1/completions", json.dumps(good_body(PROMPTS[0], 12)).encode())
    assert (status, json.loads(content)["choices"][0]["text"]) == (200, texts[PROMPTS[0]])
    assert "Traceback" not in gateway.log.read_text()


def stream_request(prompt: str, max_tokens: int) -> bytes:
    body = json.dumps({**good_body(prompt, max_tokens), "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_vanishing_clients(server: TritonServer, gateway: Gateway, texts: dict[str, str], seeds: Seeds) -> None:
    rng, good = random.Random(SEED), Http(gateway.url)

    def vanish(connection: object, index: int, rng: random.Random) -> None:
        request = stream_request("once", 50000)
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=ANSWER_WITHIN_S) as client:
            client.sendall(request if rng.random() < 0.5 else request[: rng.randrange(len(request))])
            if rng.random() < 0.3:
                client.settimeout(0.05)
                with contextlib.suppress(OSError):
                    client.recv(100)

    fds = Path(f"/proc/{gateway.pid}/fd")
    with unharmed(server):
        before = len(list(fds.iterdir()))
        run_cases(lambda: Http(gateway.url), vanish, seeds(200, 1000), SEED)
        for _ in range(4):
            prompt = rng.choice(PROMPTS)
            status, content = good.post("/v1/completions", json.dumps(good_body(prompt, 12)).encode())
            assert (status, json.loads(content)["choices"][0]["text"]) == (200, texts[prompt])
    good.close()
    wait_until(lambda: len(list(fds.iterdir())) <= before + 10, "connections closed")


def test_a_slow_reader(server: TritonServer, gateway: Gateway, llm: LLM, texts: dict[str, str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=SLOW_TOKENS, ignore_eos=True)
    (whole,) = llm.generate(["a slow reader"], params, use_tqdm=False)
    with unharmed(server), socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.settimeout(ANSWER_WITHIN_S)
        slow.connect(("127.0.0.1", gateway.port))
        slow.sendall(stream_request("a slow reader", SLOW_TOKENS))
        received = slow.recv(100)
        connection = Http(gateway.url)
        for prompt in PROMPTS:
            status, content = connection.post("/v1/completions", json.dumps(good_body(prompt, 12)).encode())
            assert (status, json.loads(content)["choices"][0]["text"]) == (200, texts[prompt])
        wait_until(lambda: active_requests(server) == 0, "the engine is done")
        received += b"".join(iter(lambda: slow.recv(65536), b""))
        response = http.client.HTTPResponse(Replay(received))  # type: ignore[arg-type]
        response.begin()
        lines = response.read().split(b"\n\n")
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole.outputs[0].text


class Replay:
    """What http.client reads a response from, of bytes that have arrived."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str):
        return io.BytesIO(self._data)


def test_the_api_key(server: TritonServer, engine_dir: Path, tmp_path: Path, texts: dict[str, str]) -> None:
    """Asked for, compared, and neither in the list of processes nor in the log."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\nother\n")
    body = json.dumps(good_body(PROMPTS[0], 12)).encode()
    with run_gateway(server, tmp_path, api_key_file=keys) as gateway:
        connection = Http(gateway.url)
        wrong = ["", "Bearer", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Basic {KEY}", KEY, f"Bearer {KEY} {KEY}"]
        for header in [*wrong, "Bearer \xe9"]:
            status, content = connection.post("/v1/completions", body, {"Authorization": header})
            assert status == 401, header
            check_error(content, header)
            assert KEY.encode() not in content
        status, content = connection.post("/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
        assert (status, json.loads(content)["choices"][0]["text"]) == (200, texts[PROMPTS[0]])
        assert KEY.encode() not in Path(f"/proc/{gateway.pid}/cmdline").read_bytes()
        connection.close()
    assert KEY not in gateway.log.read_text()
