"""generate, chat and bench with the URL of a server: of the gateway, and of servers that fail in every way."""

import contextlib
import gc
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from kvforge.bench.load import arrivals
from kvforge.cli import main
from tests.cpu.gateway.fake_triton import FakeTriton, bytes_of

LEVELS = ["--input-len", "7", "--output-len", "5", "--num-prompts", "3"]

SCATTER = 0.1
"""Three standard errors of the standard deviation of 2000 exponential gaps, sqrt(2 / 2000) of it."""


class Scripted(BaseHTTPRequestHandler):
    """Answers a path with the status, type and bytes that ``answers`` has for it."""

    answers: dict[str, tuple[int, str, bytes]]
    unknown: tuple[bytes, ...] = ()
    """Words of a body that are refused."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, kind, data = self.answers.get(self.path, (404, "text/plain", b""))
        if any(word in body for word in self.unknown):
            status, kind, data = 400, "application/json", b'{"error": {"message": "unknown field"}}'
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def fields(triton: FakeTriton) -> dict:
    return {name: triton.requests[-1].tensors[name].reshape(-1).tolist() for name in triton.requests[-1].tensors}


def test_generate_streams_each_prompt(url: str, triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--max-tokens", "9", "--temperature", "0.5", "--seed", "7", "--n", "2", "--stop", "zz"]
    assert main(["generate", f"{url}/v1/", "--prompt", "a", "--prompt", "b", *sampling]) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(f"[{i}/2.{j}] hello\n" for i in (1, 2) for j in (1, 2))
    assert captured.err == "kvforge: model tiny\n"
    sent = fields(triton)
    assert (sent["request_output_len"], sent["temperature"], sent["seed"]) == ([9], [0.5], [7])
    assert main(["generate", url, "--prompt", "a", "--json", "--logprobs", "1", "--chat", "--system", "s"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["choices"][0]["message"]["content"] == "hello" and answer["choices"][0]["logprobs"]
    assert bytes(token - 3 for token in triton.requests[-1].prompt) == b"[system]s[user]a[assistant]"


def test_chat_keeps_the_conversation(url: str, triton: FakeTriton, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", url, "--model", "tiny"]) == 0
    assert capsys.readouterr().out == "hello\nhello\n"
    prompt = bytes(token - 3 for token in triton.requests[-1].prompt)
    assert prompt == b"[user]one[assistant]hello[user]two[assistant]"


def test_what_a_model_thinks_is_no_part_of_its_answer(scripted: str, capsys, monkeypatch) -> None:
    deltas = ({"reasoning_content": "Hm.", "reasoning": "Hm."}, {"content": "Yes"}, {"content": "!"})
    events = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\r\n\r\n" for delta in deltas]
    stream = "".join([*events, "data: [DONE]\r\n\r\n"]).encode()
    Scripted.answers = {"/v1/chat/completions": (200, "text/event-stream; charset=utf-8", stream)}
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert main(["chat", f"{scripted}/v1", "--model", "m"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Yes!\n", "Hm.")


def test_a_key_is_sent_and_never_shown(start, tmp_path: Path, triton: FakeTriton, capsys, monkeypatch) -> None:
    (tmp_path / "keys").write_text("secret\n")
    url = start(api_key_file=tmp_path / "keys")
    ask = ["generate", url, "--prompt", "a"]
    assert main(ask) == 1
    assert "answered 401 (the API key is missing or wrong); give its key by --api-key" in capsys.readouterr().err
    assert main([*ask, "--api-key", "secret", "-v"]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main(ask) == 0
    assert main([*ask, "--api-key", "wrong", "-v"]) == 1
    captured = capsys.readouterr()
    assert "secret" not in captured.out + captured.err and "wrong;" not in captured.err


def test_load_sends_token_ids_and_counts_by_usage(url: str, triton: FakeTriton, tmp_path: Path, capsys) -> None:
    triton.script = lambda request: bytes_of("hello", request)
    report = tmp_path / "load.json"
    arguments = ["--concurrency", "1", "2", "--goodput", "ttft:60000", "--output", str(report), "--num-warmups", "2"]
    assert main(["bench", url, *LEVELS, *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("Successful requests:                     3\n") == 2
    assert "Median TTFT (ms):" in captured.out and captured.err == "kvforge: model tiny\n"
    prompts = [tuple(request.prompt) for request in triton.requests]
    assert {len(prompt) for prompt in prompts} == {7} and len(set(prompts)) == len(prompts) == 2 + 2 * 3
    one, two = json.loads(report.read_text())["levels"]
    assert (one["max_concurrent_requests"], two["max_concurrent_requests"]) == (1, 2)
    for level in (one, two):
        assert (level["total_input_tokens"], level["total_output_tokens"], level["short"]) == (21, 15, 0)
        assert level["request_goodput"] == level["request_throughput"] and level["median_ttft_ms"] > 0
    assert report.with_suffix(".svg").read_text().startswith("<?xml")


def test_arrivals_have_the_rate_and_the_scatter_of_a_poisson_process() -> None:
    waits = arrivals(4.0, 2001, np.random.default_rng(0))
    assert waits[0] == 0 and waits[-1] == pytest.approx(500.0)
    gaps = np.diff(waits)
    assert gaps.min() > 0 and gaps.std() == pytest.approx(gaps.mean(), rel=SCATTER), "as of exponential gaps"
    assert not arrivals(float("inf"), 3, np.random.default_rng(0)).any()


def test_load_says_what_failed(url: str, triton: FakeTriton, capsys) -> None:
    triton.script = lambda request: bytes_of("hell", request, finish="stop")
    assert main(["bench", url, *LEVELS, "--request-rate", "1000", "--json"]) == 0
    captured = capsys.readouterr()
    assert "answers have 4 tokens in place of 5" in captured.err and json.loads(captured.out)["short"] == 3
    assert main(["bench", url, *LEVELS, "--input-len", "5000"]) == 1
    assert "takes at most 4095" in capsys.readouterr().err


def test_without_usage_chunks_are_tokens(scripted: str, capsys) -> None:
    event = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
    Scripted.answers = {"/v1/completions": (200, "text/event-stream", event * 5 + b"data: [DONE]\n\n")}
    assert main(["bench", scripted, "--model", "m", *LEVELS, "--json"]) == 0
    captured = capsys.readouterr()
    assert "tokens are streamed chunks" in captured.err and "prompts are 7 words" in captured.err
    assert json.loads(captured.out)["total_output_tokens"] == 15


def test_fields_that_a_server_refuses_are_left_out_and_said(scripted: str, capsys, monkeypatch) -> None:
    event = b'data: {"choices": [{"index": 0, "text": "xyz"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}\n\n'
    answer = event * 2 + usage + b"data: [DONE]\n\n"
    Scripted.answers = {"/v1/completions": (200, "text/event-stream", answer)}
    monkeypatch.setattr(Scripted, "unknown", (b"continuous_usage_stats", b"min_tokens"))
    assert main(["bench", scripted, "--model", "m", *LEVELS, "--json"]) == 0
    captured = capsys.readouterr()
    for note in ("refuses continuous_usage_stats", "refuses ignore_eos or min_tokens", "4 tokens in place of 5"):
        assert note in captured.err
    found = json.loads(captured.out)
    assert (found["total_input_tokens"], found["total_output_tokens"], found["short"]) == (27, 12, 3)


def stream_of(*events: dict) -> tuple[int, str, bytes]:
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return 200, "text/event-stream", f"{lines}data: [DONE]\n\n".encode()


def test_a_count_in_the_last_chunk_alone_is_no_token_that_came_with_it(scripted: str, capsys) -> None:
    chunk, end = {"choices": [{"text": "xy"}], "error": None}, {"prompt_tokens": 9, "completion_tokens": 5}
    Scripted.answers = {"/v1/completions": stream_of(chunk, {"choices": [{"text": ""}], "usage": end})}
    assert main(["bench", scripted, "--model", "m", *LEVELS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["total_input_tokens"], found["total_output_tokens"], found["short"]) == (27, 15, 0)
    assert "mean_itl_ms" not in found and "mean_tpot_ms" not in found, "all tokens came at once"


@pytest.mark.parametrize(
    "event",
    [
        {"choices": 7},
        {"choices": {"a": 1}},
        {"choices": [], "usage": "lots"},
        {"choices": [], "usage": {"completion_tokens": "five"}},
        {"choices": [], "usage": {"completion_tokens": float("nan")}},
        {"choices": [], "usage": {"completion_tokens": -3}},
        {"choices": [], "usage": {"prompt_tokens": "a", "completion_tokens": 5}},
    ],
)
def test_load_says_what_no_api_sends(scripted: str, capsys, event: dict) -> None:
    Scripted.answers = {"/v1/completions": stream_of({"choices": [{"text": "x"}]}, event)}
    assert main(["bench", scripted, "--model", "m", *LEVELS]) == 1
    assert "streams what is no answer of OpenAI's API" in capsys.readouterr().err


def test_half_a_letter_is_written_where_the_terminal_is_of_no_language(scripted: str, monkeypatch) -> None:
    Scripted.answers = {"/v1/completions": stream_of({"choices": [{"text": "a\ud800b"}]})}
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="utf-8", errors="surrogateescape"))
    assert main(["generate", scripted, "--model", "m", "--prompt", "x"]) == 0
    assert written.getvalue() == b"a\\ud800b\n"


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_a_chat_and_leaves_no_task(monkeypatch, caplog) -> None:
    class Silent(Scripted):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(0.3)  # until the client waits
            os.kill(os.getpid(), signal.SIGINT)
            self.rfile.read()

    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main(["chat", f"http://127.0.0.1:{server.server_port}", "--model", "m"]) == 130
        server.shutdown()
    gc.collect()
    assert "_Chat._write" not in caplog.text


@pytest.mark.parametrize("status", [401, 200])
def test_what_a_server_says_shows_no_key_and_moves_no_cursor(scripted: str, capsys, status: int) -> None:
    error = {"error": {"message": "\x1b[2Jwrong key: sk-1"}}
    Scripted.answers = {"/v1/completions": (status, *stream_of(error)[1:])}
    if status != 200:
        Scripted.answers = {"/v1/completions": (status, "application/json", json.dumps(error).encode())}
    assert main(["generate", scripted, "--model", "m", "--prompt", "x", "--api-key", "sk-1"]) == 1
    error_line = capsys.readouterr().err
    assert "wrong key: ***" in error_line and "sk-1" not in error_line and "\x1b" not in error_line
    Scripted.answers["/v1/models"] = (200, "application/json", b'{"data": [{"id": "\\u001b[2Jm"}]}')
    assert main(["generate", scripted, "--prompt", "x"]) == 1
    assert capsys.readouterr().err.startswith("kvforge: model  [2Jm\n")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((503, "application/json", b'{"error": {"message": "Loading model"}}'), "answered 503 (Loading model); try"),
        ((404, "application/json", b'{"detail": "no such model"}'), "404 (no such model); --model NAME"),
        ((200, "text/html", b"<html>"), "does not stream"),
        ((200, "text/event-stream", b"data: {\n\n"), "does not answer in JSON"),
        ((200, "text/event-stream", b'data: {"choices": []}\n\n'), "ended its answer early"),
        ((200, "text/event-stream", b'data: {"error": {"message": "out of memory"}}\n\n'), "failed: out of memory;"),
        ((200, "text/event-stream", b'data: {"choices": [5]}\n\n'), "no answer of OpenAI's API"),
        ((200, "text/event-stream", b'data: {"choices": 7}\n\n'), "no answer of OpenAI's API"),
        ((200, "text/event-stream", b'data: {"choices": [{"index": 1e999}]}\n\n'), "no answer of OpenAI's API"),
    ],
)
def test_errors_are_a_sentence(scripted: str, capsys, answer: tuple[int, str, bytes], says: str) -> None:
    Scripted.answers = {"/v1/completions": answer}
    assert main(["generate", scripted, "--model", "m", "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.parametrize(("status", "says"), [(200, "no answer of OpenAI's API"), (500, "answered 500 (xxx")])
def test_an_answer_without_an_end_is_left(monkeypatch, capsys, status: int, says: str) -> None:
    monkeypatch.setattr("kvforge.remote.server.MAX_EVENT_BYTES", 1 << 16)

    class Endless(Scripted):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x" * 4096)

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["generate", url, "--model", "m", "--prompt", "x"]) == 1
        server.shutdown()
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "URL", "--kv-cache-gib", "1"], "--kv-cache-gib is for an engine"),
        (["generate", "URL", "--chat-template", "x", "--chat"], "--chat-template is for an engine"),
        (["generate", "URL", "--logprobs", "1"], "--logprobs of a server is written by --json"),
        (["chat", "URL", "--speculative-method", "ngram"], "--speculative-method is for an engine"),
        (["bench", "URL", "--max-num-tokens", "1"], "--max-num-tokens is for an engine"),
        (["bench", "URL", "--request-rate", "1", "2", "--concurrency", "1", "2"], "give one value to one of them"),
        (["bench", "URL", "--request-rate", "0"], "give numbers above 0"),
        (["bench", "URL", "--request-rate", "5e-324"], "give numbers above 0"),
        (["bench", "URL", "--goodput", "ttf:5"], "--goodput is of ttft"),
        (["bench", "URL", "--seed", "-1"], "--seed is -1; give 0 or more"),
        (["bench", "URL", "--output", "/"], "--output / cannot be written"),
        (["bench", "URL", "--output", "x.svg", "--concurrency", "1", "2"], "x.svg is the name of the figure"),
        (["bench", "ENGINE", "--num-prompts", "5"], "--num-prompts is for the URL of a server"),
        (["generate", "ENGINE", "--model", "x", "--prompt", "x"], "--model is for the URL of a server"),
        (["generate", "URL", "--prompt", "x", "--api-key", "sec\nret"], "characters that no HTTP header may have"),
        (["generate", "http://u:secret@h", "--prompt", "x"], "a key by --api-key"),
        (["generate", "http://127.0.0.1:9", "--prompt", "x"], "nothing answers at http://127.0.0.1:9/v1"),
        (["generate", "URL", "--prompt", "x"], "lists no model; name one by --model"),
    ],
)
def test_refusals(scripted: str, capsys, arguments: list[str], says: str) -> None:
    Scripted.answers = {}
    assert main([scripted if word == "URL" else word for word in arguments]) == 1
    error = capsys.readouterr().err
    assert says in error and "secret" not in error
