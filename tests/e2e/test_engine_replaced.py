"""Another engine in the directory of a running server: it serves what it loaded, and nothing after that."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvforge.common.errors import KvforgeError
from kvforge.manifest import WEIGHTS_FILE
from tests.e2e.conftest import LONG
from tests.e2e.test_operations_restart import answer, child, openai_answer, tritonserver
from tests.e2e.test_stalls import OPENAI, gateway_ready, probes
from tests.support.models.engines import with_file
from tests.support.models.shelf import EngineShelf
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import engine_process, wait_until

REPLACED = "was replaced by another one while it was served; restart kvforge serve"


class Place:
    """The directory that a server was started with, and what lies there."""

    def __init__(self, path: Path, engines: dict[str, Path]) -> None:
        self.path, self._engines = path, engines

    def put(self, name: str) -> None:
        """As `kvforge build` does: by renaming a whole directory."""
        draft = self.path.with_name("draft")
        shutil.copytree(self._engines[name], draft)
        if self.path.exists():
            self.path.rename(self.path.with_name("away"))
            shutil.rmtree(self.path.with_name("away"))
        draft.rename(self.path)


def negate_weights(path: Path) -> None:
    content = bytearray(path.read_bytes())
    tensors = np.frombuffer(content, np.float32, offset=8 + int.from_bytes(content[:8], "little"))
    np.negative(tensors, out=tensors)
    path.write_bytes(content)


def with_other_weights(engine: Path, copy: Path) -> Path:
    """An engine of the same sizes whose weights are others: nothing but the digest tells them apart."""
    return with_file(engine, copy, WEIGHTS_FILE, negate_weights)


@pytest.fixture
def place(engines: EngineShelf, tmp_path: Path) -> Iterator[Place]:
    old = engines.engine(LONG)
    made = Place(tmp_path / "served", {"old": old, "new": with_other_weights(old, tmp_path / "new")})
    made.put("old")
    yield made


def test_after_the_engine_process_died_nobody_answers_in_its_name(place: Place) -> None:
    with ServeProcess(place.path, *OPENAI, program=FAKE) as running:
        wait_until(lambda: probes(running) == [200, 200, 200], "a ready server")
        before = answer(running)
        place.put("new")
        assert answer(running) == openai_answer(running) == before
        os.kill(engine_process(tritonserver(running).pid).pid, signal.SIGKILL)
        wait_until(lambda: running.health()[1]["engine"] == "replaced", "the other engine noticed")
        server = tritonserver(running)
        for _ in range(30):
            with pytest.raises(KvforgeError, match=REPLACED):
                answer(running)
        status, report = running.health()
        assert status == 503 and REPLACED in report["reasons"][0] and len(report["reasons"]) == 1
        assert running.health("live")[0] == 200 and report["restarts"] == 0
        assert REPLACED in gateway_ready(running)[1]["reason"]
        assert tritonserver(running) == server
        # What was there before may be put back.
        place.put("old")
        wait_until(lambda: _is_answer(running, before), "the old engine")
        wait_until(lambda: probes(running) == [200, 200, 200], "a ready server")


def _is_answer(running: ServeProcess, text: str) -> bool:
    try:
        return answer(running) == text
    except KvforgeError:
        return False


def test_a_server_that_died_is_not_started_with_another_engine(place: Place) -> None:
    with ServeProcess(place.path, program=FAKE) as running:
        place.put("new")
        tritonserver(running).kill()
        status, errors = running.wait()
    assert status == 1
    assert errors.splitlines()[-1].startswith("kvforge: error: the engine 'served' " + REPLACED)


def test_a_gateway_that_died_is_not_started_with_another_tokenizer(place: Place) -> None:
    with ServeProcess(place.path, *OPENAI, "--max-restarts", "1", program=FAKE) as running:
        place.put("new")
        child(running, b"gateway").kill()
        status, errors = running.wait()
    assert status == 1
    assert REPLACED in errors.splitlines()[-1]
