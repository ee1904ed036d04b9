"""Calls to a server that dies in the middle of its answer, or is none: an error of ours, never one of the library's."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.serving.health.canary import Canary
from kvforge.serving.health.probe import generate, has_metrics, is_ready, read_metrics

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
BROKEN = {
    "no HTTP": b"GET /v2/health/ready HTTP/1.1\r\n\r\n",
    "nothing": b"",
    "half a body": HEAD + b'{"text',
}


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """A server that answers every request with these bytes and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if not connection.recv(65536):
                        return
                    connection.sendall(data)

        thread = threading.Thread(target=run)
        thread.start()
        port = listener.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_answers(name: str) -> None:
    with answering(BROKEN[name]) as url:
        with pytest.raises(KvforgeError, match="did not answer"):
            generate(url, "ensemble", {})
        with pytest.raises(OSError):
            read_metrics(f"{url}/metrics")
        assert not has_metrics(f"{url}/metrics")


@pytest.mark.parametrize("name", ["no HTTP", "nothing"])
def test_no_status_is_not_ready(name: str) -> None:
    with answering(BROKEN[name]) as url:
        assert not is_ready(url)


def test_an_answer_that_is_no_json() -> None:
    with (
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{]") as url,
        pytest.raises(KvforgeError, match="answer"),
    ):
        generate(url, "ensemble", {})


def test_a_refusal_without_its_whole_message() -> None:
    with (
        answering(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\n{") as url,
        pytest.raises(KvforgeError, match=r"refused a request: .*503"),
    ):
        generate(url, "ensemble", {})


def test_the_canary_outlives_a_server_that_dies_in_mid_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)
    real: Callable = generate

    def counted(*args, **more):
        try:
            return real(*args, **more)
        finally:
            asked.release()

    monkeypatch.setattr("kvforge.serving.health.canary.generate", counted)
    with answering(BROKEN["half a body"]) as url:
        canary = Canary(0.01)
        canary.start(url)
        for _ in range(3):
            assert asked.acquire(timeout=60)
        canary.close()
        assert canary._thread is not None
        canary._thread.join(60)
        assert "got no answer" in (canary.failure() or "")


def test_a_proxy_of_the_environment_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be asked for a server on this machine, which it does not reach."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na 1\n") as url:
        assert is_ready(url) and read_metrics(f"{url}/metrics") == {"a": 1.0}
