"""A request whose client cancels or goes away gives its pages back at once, through every model."""

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient, StreamResponse
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.fake_server import fake_server
from tests.support.serving.server import ENDLESS, ask, client_process, log_of, used_pages, wait_until

MODELS = ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"]
PROMPTS = {"tensorrt_llm": [5, 6, 7, 8], "ensemble": "hello there", "tensorrt_llm_bls": "hello there"}


@pytest.fixture(autouse=True)
def no_pages_before(server: TritonServer) -> None:
    wait_until(lambda: used_pages(server) == 0, "a quiet server")


@pytest.fixture
def freed(server: TritonServer, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Waits for the endless request's pages; how long that took goes to the report (--junitxml)."""

    def wait() -> None:
        seconds = wait_until(lambda: used_pages(server) == 0, "pages free")
        request.node.user_properties.append(("seconds_to_free", seconds))

    return wait


def drain(responses: Iterator[StreamResponse]) -> None:
    with pytest.raises(KvforgeError, match=r"[Cc]ancelled"):
        for _ in responses:
            pass


def check_stopped(responses: list[StreamResponse], model: str, streaming: bool) -> None:
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert streaming or len(responses) == 1
    if model == "tensorrt_llm":
        assert responses[-1].tensors["finish_reason"].item() == b"cancelled"
        assert 0 < sum(len(response.token_ids) for response in responses) < ENDLESS


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_client_cancels(server: TritonServer, freed, model: str, streaming: bool) -> None:
    client = StreamingClient(server.grpc_url)
    responses = client.generate(model, ask(model, PROMPTS[model], ENDLESS, streaming))
    reader = threading.Thread(target=drain, args=(responses,))
    reader.start()
    wait_until(lambda: used_pages(server) > 0, "the request runs")
    client.cancel()
    freed()
    reader.join()
    client.close()


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_client_is_killed(server: TritonServer, freed, model: str, streaming: bool) -> None:
    process = client_process(server, model, json.dumps(ask(model, PROMPTS[model], ENDLESS, streaming)))
    try:
        wait_until(lambda: used_pages(server) > 0, "the request runs")
    finally:
        process.kill()
    process.wait()
    freed()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_generate_stream_disconnects(server: TritonServer, freed, model: str) -> None:
    connection = http.client.HTTPConnection(server.options.address, server.ports["http"])
    body = {"text_input": "hello there", "max_tokens": ENDLESS, "stream": True}
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
    response = connection.getresponse()
    assert response.read(16)
    wait_until(lambda: used_pages(server) > 0, "the request runs")
    response.close()
    connection.close()
    freed()


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_stop_with_the_same_id(server: TritonServer, freed, model: str, streaming: bool) -> None:
    """The stopped request ends as any other, with the tokens that it has; another's goes on."""
    with StreamingClient(server.grpc_url) as client, StreamingClient(server.grpc_url) as other:
        responses = client.generate(model, ask(model, PROMPTS[model], ENDLESS, streaming), request_id="mine")
        wait_until(lambda: used_pages(server) > 0, "the request runs")
        kept = other.generate(model, ask(model, PROMPTS[model], ENDLESS), request_id="not mine")
        read = [next(kept)]
        with StreamingClient(server.grpc_url) as stopper:
            stop = ask("tensorrt_llm", [], 0, stop=True)
            assert list(stopper.generate("tensorrt_llm", stop, request_id="mine")) == []
            check_stopped(list(responses), model, streaming)
            read.append(next(kept))
            assert list(stopper.generate("tensorrt_llm", stop, request_id="not mine")) == []
            check_stopped([*read, *kept], model, True)
    freed()


def test_stop_without_an_id_is_refused(server: TritonServer) -> None:
    with StreamingClient(server.grpc_url) as client, pytest.raises(KvforgeError, match="give both requests an id"):
        list(client.generate("tensorrt_llm", ask("tensorrt_llm", [], 0, stop=True), request_id=""))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_cancels_right_after_the_first_response_leave_nothing_behind(engine_dir: Path, model: str) -> None:
    """An error close behind a response is where Triton's ensemble loses the end of a request. Triton may also lock
    itself up there (docs/load-testing.md): that must be noticed, and only that excuses pages that stay."""

    def locked_up() -> bool:
        return server.failure() is not None

    def cancel_some() -> None:
        with contextlib.suppress(KvforgeError):  # a server that is locked up ends before its answer
            for _ in range(10):
                client = StreamingClient(server.grpc_url)
                next(client.generate(model, ask(model, "hello there", ENDLESS)))
                client.cancel()
                client.close()
            done.set()

    done = threading.Event()
    with fake_server(engine_dir) as server:
        cancelling = threading.Thread(target=cancel_some)
        cancelling.start()
        wait_until(lambda: done.is_set() or locked_up(), "answers, or a server that says it hangs")
        if done.is_set():
            wait_until(lambda: locked_up() or used_pages(server) == 0, "pages free")
        if locked_up():
            assert any("a response has not left within" in line for line in server._log_lines()), log_of(server)
    cancelling.join()
