"""Reading bodies holds the event loop for small ones alone; a large or deadly one costs its own request."""

import asyncio
import dataclasses
import itertools
import json
import logging
import resource
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvforge.gateway.endpoints import Endpoint
from kvforge.gateway.errors import ApiError
from kvforge.gateway.languages.asked_forms import Calls, Thinking
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions, gateway_command
from kvforge.gateway.parsed_request import ParsedRequest, pack, unpack
from kvforge.gateway.requests import reading
from kvforge.gateway.requests.reading import AT_ONCE, IN_THREAD, NUM_WORKERS, BodyReading
from kvforge.gateway.requests.request_reader import RequestReader
from kvforge.manifest import TOKENIZER_DIR
from kvforge.serving.processes.facts import children
from kvforge.workers import WorkersUnavailable
from kvforge.workers.process import WorkerProcess
from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton
from tests.cpu.gateway.http_calls import COMPLETION, call, post
from tests.support.hostile.bodies import CHATS, COMPLETIONS

HELLO = [{"role": "user", "content": "hi"}]
LARGE = 1 << 20


async def ticks_while(work) -> tuple[object, int]:
    """What `work` gives or raises (ApiError), and how often the loop came by meanwhile."""
    ticks = 0
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0 if ticks < 2 else 0.002)  # a loop without a rest takes a core
        ticks += 1
    try:
        return task.result(), ticks
    except ApiError as error:
        return error, ticks


@pytest.fixture
def all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NUM_WORKERS", NUM_WORKERS)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> GatewayOptions:
    return GatewayOptions(engine=write_engine_files(tmp_path_factory.mktemp("reading") / "tiny"), read_timeout=5.0)


def test_no_large_body_is_read_on_the_loop(options: GatewayOptions, monkeypatch) -> None:
    """The loop goes round while each class of body is read, and nothing large is read in its thread."""
    on_loop: list[int] = []
    read = RequestReader.read

    def watch(self: RequestReader, data: bytes, chat: bool) -> ParsedRequest:
        if threading.current_thread() is threading.main_thread():
            on_loop.append(len(data))
        return read(self, data, chat)

    monkeypatch.setattr(RequestReader, "read", watch)

    async def run() -> None:
        reader = BodyReading(ServedModel.load(options), options)
        await reader.read(json.dumps(COMPLETION).encode(), False)
        try:
            for size in (AT_ONCE // 2, IN_THREAD // 2, LARGE):
                for chat, bodies in ((False, COMPLETIONS), (True, CHATS)):
                    for name, make in bodies.items():
                        data = make(size)
                        found, ticks = await ticks_while(reader.read(data, chat))
                        assert isinstance(found, ParsedRequest | ApiError), name
                        if isinstance(found, ApiError):
                            assert found.status in (400, 404), (name, found.message)
                            assert "\n" not in found.message
                        if len(data) > AT_ONCE:
                            assert ticks > 1, name
                        assert len(pack(found)) < 1 << 20, name
        finally:
            await reader.close()

    asyncio.run(run())
    assert on_loop and max(on_loop) <= AT_ONCE


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES, Endpoint.COUNT_TOKENS])
def test_tools_are_read_by_a_worker(options: GatewayOptions, monkeypatch, endpoint: Endpoint) -> None:
    """Whatever they hold: many functions, wide and deep schemas, references in circles or to each other."""

    def refuse(self: RequestReader, data: bytes, endpoint: Endpoint) -> ParsedRequest:
        raise AssertionError("read in this process")

    monkeypatch.setattr(RequestReader, "read", refuse)
    deep: dict = {}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    wide = {f"p{index}": {"type": "string", "pattern": "(a|b)*" * 20} for index in range(500)}
    twice = {f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(60)}
    schemas = [
        {"properties": {"a": deep}}, {"properties": wide}, {"$defs": {**twice, "d60": {}}, "$ref": "#/$defs/d0"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"$ref": "#/nowhere"}, {"$ref": "x" * 5000},
    ]  # fmt: skip

    async def run() -> None:
        reader = BodyReading(ServedModel.load(options), dataclasses.replace(options, tool_call_format="hermes"))
        try:
            for schema, choice in itertools.product(schemas, ("auto", "required")):
                function = {"name": "f", "parameters": {"type": "object", **schema}}
                body: dict = {"model": "tiny", "tool_choice": choice}
                if endpoint in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS):
                    body |= {
                        "messages": HELLO,
                        "max_tokens": 9,
                        "tool_choice": {"type": "any" if choice == "required" else choice},
                    }
                    body |= {"tools": [{"name": "f", "input_schema": function["parameters"]}]}
                elif endpoint == Endpoint.CHAT:
                    body |= {"messages": HELLO, "tools": [{"type": "function", "function": function}]}
                else:
                    body |= {"input": "hi", "tools": [{"type": "function", **function}]}
                found, ticks = await ticks_while(reader.read(json.dumps(body).encode(), endpoint))
                assert isinstance(found, ParsedRequest | ApiError) and ticks > 1
                assert isinstance(found, ParsedRequest) or found.status == 400, found.message
        finally:
            await reader.close()

    asyncio.run(run())


def test_asked_survives_the_way() -> None:
    asked = ParsedRequest(
        b"\n\0t", (b"abcd", b"efghijkl"), 2, ("é", "\n"), 3, True, False, (b"\\n", b""),
        Calls("hermes", {"f": {"a": ["string"]}, "é": {}}, "<t>\n", True, False), Thinking("think", True, {"</t>": 5}),
        {"guide": "tools"}, 1, True, False, {"metadata": {"a": "é"}},
    )  # fmt: skip
    assert unpack(pack(asked)) == asked and asked.num_prompt_tokens == 3
    with pytest.raises(ApiError) as found:
        unpack(pack(ApiError(404, "ä", "p", "c", "d")))
    assert (found.value.status, found.value.message, found.value.param, found.value.code) == (404, "ä", "p", "c")
    assert found.value.logged == "ä (d)"


def test_large_requests_are_served(url: str, triton: FakeTriton) -> None:
    answer = post(f"{url}/v1/completions", {**COMPLETION, "user": "u" * LARGE, "logit_bias": {"5": 2.5}, "echo": True})
    assert answer.status == 200 and json.loads(answer.body)["choices"][0]["text"] == "xhello"
    assert triton.requests[0].prompt == [ord("x") + 3]
    assert triton.requests[0].tensors["embedding_bias"][0][5] == 2.5


TEMPLATES = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "to read",
    "{{ 'a' * 10**10 }}": "memory|refuses this conversation",
    "{% for m in messages %}{{ m.content * 10**9 }}{% endfor %}": "memory|refuses this conversation",
    "{{ '%999999999999d' % 1 }}": "memory|refuses this conversation",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_that_are_bombs(start: Callable[..., str], triton: FakeTriton, tmp_path: Path, template: str) -> None:
    """The chat is refused; completions go on in the same process, and so do chats that are harmless."""
    file = tmp_path / "template"
    file.write_text("{% if messages[0].content == 'bomb' %}" + template + "{% endif %}hi")
    url = start(chat_template=file, read_timeout=1.0)
    bomb = {"model": "tiny", "messages": [{"role": "user", "content": "bomb"}]}
    answer = post(f"{url}/v1/chat/completions", bomb)
    assert answer.status == 400
    assert any(words in json.loads(answer.body)["error"]["message"] for words in TEMPLATES[template].split("|"))
    assert post(f"{url}/v1/completions", COMPLETION).status == 200
    assert post(f"{url}/v1/chat/completions", {"model": "tiny", "messages": HELLO}).status == 200


def test_a_tokenizer_that_panics(start: Callable[..., str], triton: FakeTriton, tmp_path: Path) -> None:
    engine = write_engine_files(tmp_path / "tiny")
    file = engine / TOKENIZER_DIR / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "^(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = pattern
    file.write_text(json.dumps(tokenizer))
    url = start(engine=engine)
    deadly = "a" * 40 + "!"
    for body in ({**COMPLETION, "prompt": deadly}, {**COMPLETION, "prompt": deadly, "user": "u" * 10_000},
                 {**COMPLETION, "prompt": deadly, "user": "u" * LARGE}):  # fmt: skip
        answer = post(f"{url}/v1/completions", body)
        assert answer.status == 400 and "tokenizer fails" in answer.body and "Traceback" not in answer.body
    answer = post(f"{url}/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": deadly}]})
    assert answer.status in (200, 400)  # the template puts its own characters around it
    assert post(f"{url}/v1/completions", COMPLETION).status == 200


def test_an_engine_that_was_replaced_is_not_read_for(options: GatewayOptions, caplog) -> None:
    model = ServedModel.load(options)

    async def run() -> None:
        reader = BodyReading(model.__class__(**{**vars(model), "digest": "0" * 64}), options)
        try:
            await reader.read(json.dumps({"model": "tiny", "messages": HELLO}).encode(), True)
        finally:
            await reader.close()

    with caplog.at_level(logging.WARNING), pytest.raises(ApiError) as found:
        asyncio.run(run())
    assert found.value.status == 503 and "not the one that the gateway was started with" in found.value.logged
    assert "started" not in found.value.message


def test_workers_that_cannot_start(start: Callable[..., str], triton: FakeTriton, monkeypatch) -> None:
    """As where no process may be made: what needs one is told so, all else is served."""

    def refuse(*args: object, **more: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr("kvforge.workers.process.subprocess.Popen", refuse)
        url = start()
        for path, body in (("chat/completions", {"model": "tiny", "messages": HELLO}),
                           ("completions", {**COMPLETION, "user": "u" * LARGE})):  # fmt: skip
            answer = post(f"{url}/v1/{path}", body)
            assert answer.status == 503 and "retry-after" in answer.headers
        assert post(f"{url}/v1/completions", COMPLETION).status == 200
    assert post(f"{url}/v1/chat/completions", {"model": "tiny", "messages": HELLO}).status == 200


def test_no_chat_waits_for_a_worker(
    start: Callable[..., str], triton: FakeTriton, all_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the gateway answers, all its workers are prepared, and chats that come together start none."""
    began: list[WorkerProcess] = []
    prepared: list[WorkerProcess] = []
    init, wait_ready = WorkerProcess.__init__, WorkerProcess.wait_ready

    def note_start(self: WorkerProcess, *args) -> None:
        began.append(self)
        init(self, *args)

    def note_ready(self: WorkerProcess) -> None:
        wait_ready(self)
        prepared.append(self)

    monkeypatch.setattr(WorkerProcess, "__init__", note_start)
    monkeypatch.setattr(WorkerProcess, "wait_ready", note_ready)
    url = start()
    assert call(url, "GET", "/ready").status == 200
    assert len(prepared) == len(began) == NUM_WORKERS
    bodies = [{"model": "tiny", "messages": HELLO}] * (NUM_WORKERS + 1)
    with ThreadPoolExecutor(len(bodies)) as clients:
        answers = list(clients.map(lambda body: post(f"{url}/v1/chat/completions", body), bodies))
    assert [answer.status for answer in answers] == [200] * len(bodies)
    assert len(prepared) == len(began) == NUM_WORKERS


def test_workers_that_are_never_ready_are_waited_for_only_so_long(
    options: GatewayOptions, all_workers: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, wait_ready = threading.Event(), WorkerProcess.wait_ready

    def hang(self: WorkerProcess) -> None:
        goes_on.wait()
        wait_ready(self)

    monkeypatch.setattr(WorkerProcess, "wait_ready", hang)
    monkeypatch.setattr(reading, "WARM_WITHIN_S", 0.1)

    async def run() -> None:
        reader = BodyReading(ServedModel.load(options), options)
        try:
            await reader.prepare()
            assert f"{NUM_WORKERS} of {NUM_WORKERS} workers have not started yet" in caplog.text
            await reader.read(json.dumps(COMPLETION).encode(), Endpoint.COMPLETIONS)
            goes_on.set()
            await reader.read(json.dumps({"model": "tiny", "messages": HELLO}).encode(), Endpoint.CHAT)
        finally:
            goes_on.set()
            await reader.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_the_url_is_told_once_the_workers_are_there(engine_files: Path, _fake) -> None:
    options = GatewayOptions(engine=engine_files, grpc=_fake[1], port=0)
    process = subprocess.Popen(gateway_command(options), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None and b"OpenAI API at" in process.stdout.readline()
        assert len(children(process.pid)) == NUM_WORKERS
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_too_many_waiting_requests_are_told_so(options: GatewayOptions, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise WorkersUnavailable("5 jobs wait for a worker; try again.")

    monkeypatch.setattr(reading.WorkerPool, "submit", refuse)

    async def run() -> None:
        reader = BodyReading(ServedModel.load(options), options)
        try:
            await reader.read(b" " * LARGE, False)
        finally:
            await reader.close()

    with pytest.raises(ApiError, match="send it again later") as found:
        asyncio.run(run())
    assert found.value.status == 503 and "5 jobs wait" in found.value.logged


def test_descriptors_that_run_out(engine_files: Path, _fake, triton: FakeTriton) -> None:
    """Connections that find no descriptor wait; once there are some again, they are served, and workers start."""
    options = GatewayOptions(engine=engine_files, grpc=_fake[1], port=0)
    process = subprocess.Popen(gateway_command(options), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    answers: list[int] = []
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().split()[-1].removesuffix("/v1")
        assert call(url, "GET", "/health").status == 200
        soft, hard = resource.prlimit(
            process.pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        waiting = threading.Thread(target=lambda: answers.append(call(url, "GET", "/health").status))
        waiting.start()
        waiting.join(0.5)
        assert not answers and process.poll() is None
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        waiting.join(60)
        assert answers == [200]
        assert post(f"{url}/v1/chat/completions", {"model": "tiny", "messages": HELLO}).status == 200
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
