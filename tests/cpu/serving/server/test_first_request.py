"""A start whose first request gets no answer broke off, and is made once more."""

import subprocess
from pathlib import Path

import pytest

from kvforge.common.addresses import find_address
from kvforge.common.errors import KvforgeError
from kvforge.serving.health.probe import NoAnswerError
from kvforge.serving.server import launcher
from kvforge.serving.server.launcher import StartBrokeOffError, TritonServer


@pytest.mark.parametrize(
    ("is_killed", "error", "kind", "words"),
    [
        (False, NoAnswerError("the server did not answer: timed out"), StartBrokeOffError, "did not answer: timed out"),
        (True, NoAnswerError("the server did not answer: reset"), StartBrokeOffError, r"tritonserver ended \(signal 9"),
        (False, KvforgeError("the server refused a request: no"), KvforgeError, "refused a request: no"),
    ],
)
def test_who_is_to_blame(
    is_killed: bool,
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
            if is_killed:
                process.kill()
            with pytest.raises(KvforgeError, match=words) as caught:
                server._first_request(process, lambda: False)
            assert type(caught.value) is kind
        finally:
            process.kill()
