"""A start whose first request gets no answer broke off, and is made once more; not where somebody ended the server."""

import signal
import subprocess
from pathlib import Path

import pytest

from kvforge.common.addresses import find_address
from kvforge.common.errors import KvforgeError
from kvforge.serving.health.probe import NoAnswerError
from kvforge.serving.server import launcher
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.start_errors import StartBrokeOffError


@pytest.mark.parametrize(
    ("ended_by", "error", "kind", "words"),
    [
        (None, NoAnswerError("the server did not answer: timed out"), StartBrokeOffError, "did not answer: timed out"),
        (signal.SIGABRT, NoAnswerError("no answer: reset"), StartBrokeOffError, r"tritonserver ended \(signal 6"),
        (signal.SIGKILL, NoAnswerError("no answer: reset"), KvforgeError, r"tritonserver ended \(signal 9"),
        (None, KvforgeError("the server refused a request: no"), KvforgeError, "refused a request: no"),
    ],
)
def test_who_is_to_blame(
    ended_by: signal.Signals | None,
    error: KvforgeError,
    kind: type[KvforgeError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generate(*_: object) -> None:
        raise error

    monkeypatch.setattr(launcher, "generate", generate)
    server = TritonServer(tmp_path)
    server.addresses, server.ports = {"http": find_address("127.0.0.1")}, {"http": 1}
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            if ended_by is not None:
                process.send_signal(ended_by)
            with pytest.raises(KvforgeError, match=words) as caught:
                server._first_request(process, lambda: False)
            assert type(caught.value) is kind
        finally:
            process.kill()
