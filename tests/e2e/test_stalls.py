"""Processes that are alive and do nothing: noticed, said by every probe, and replaced; a standstill of all is none."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvforge.serving.processes.facts import ProcessId, children, descendants, model_of_stub, wait_gone
from tests.e2e.test_operations_restart import answer, open_streams, openai_answer, tritonserver
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import engine_process, wait_until

NOTICED_WITHIN_S = 60.0
"""An order of magnitude more than it takes, which the test prints."""
FLOOR_S = "2"
"""What any piece of the engine's work may take, of its 5 s."""
HUNG_AFTER_S = "12"
"""When a silent stub is given up, of its 30 s: after twice the time in which it is missed."""
STANDSTILL_S = 12.0
OPENAI = ("--openai", "--openai-port", "0", "--served-model-name", "served")


def stub(running: ServeProcess) -> ProcessId:
    (found,) = [p for p in children(tritonserver(running).pid) if model_of_stub(p) == "tensorrt_llm"]
    return found


def gateway_ready(running: ServeProcess) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(running.openai_url.removesuffix("/v1") + "/ready", timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def probes(running: ServeProcess) -> list[int]:
    return [running.health("ready")[0], running.health("live")[0], gateway_ready(running)[0]]


def test_an_engine_process_that_does_not_step_is_replaced(engine_dir: Path, tmp_path: Path) -> None:
    gate = tmp_path / "another engine loads until this is gone"
    with ServeProcess(engine_dir, *OPENAI, "--floor-s", FLOOR_S, "--gate", str(gate), program=FAKE) as running:
        wait_until(lambda: probes(running) == [200, 200, 200], "a ready server")
        before = answer(running)
        for signum in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGUSR2):
            for is_idle in (False, True):
                answer(running), answer(running)  # steps of known length
                errors: list[str] = []
                threads = [] if is_idle else open_streams(running, errors)
                old = engine_process(tritonserver(running).pid)
                gate.touch()
                os.kill(old.pid, signum)
                seconds = wait_until(lambda: running.health()[0] == 503, "the stall noticed", NOTICED_WITHIN_S)
                print(f"{signum.name}, {'idle' if is_idle else 'busy'}: noticed within {seconds:.1f} s")
                assert probes(running) == [503, 503, 503]
                reason = "the engine stopped answering; it was ended and is started again"
                assert running.health()[1]["reasons"] == [reason]
                assert gateway_ready(running)[1]["reason"] == reason
                for thread in threads:
                    thread.join(NOTICED_WITHIN_S)
                assert len(errors) == len(threads)
                assert all("the engine stopped answering" in error for error in errors)
                assert wait_gone([old], NOTICED_WITHIN_S) == []
                gate.unlink()
                while (found := probes(running)) != [200, 200, 200]:
                    assert found[:2] in ([503, 503], [503, 200], [200, 200])  # never ready and not alive
                    time.sleep(0.01)
                assert answer(running) == openai_answer(running) == before
                assert running.health()[1]["restarts"] == 0


def test_a_stub_that_is_stopped_is_replaced_with_its_server(engine_dir: Path) -> None:
    with ServeProcess(engine_dir, *OPENAI, "--hung-after-s", HUNG_AFTER_S, program=FAKE) as running:
        wait_until(lambda: probes(running) == [200, 200, 200], "a ready server")
        before = answer(running)
        old = tritonserver(running)
        os.kill(stub(running).pid, signal.SIGSTOP)
        seconds = wait_until(lambda: probes(running) == [503, 503, 503], "the silence noticed", NOTICED_WITHIN_S)
        print(f"noticed within {seconds:.1f} s")
        reasons = running.health()[1]["reasons"]
        assert reasons == ["the process of model 'tensorrt_llm' does not say how the engine is"]
        wait_until(lambda: probes(running) == [200, 200, 200], "another server")
        assert answer(running) == openai_answer(running) == before
        assert running.health()[1]["restarts"] == 1
        assert not old.is_alive()


def test_a_standstill_of_all_processes_is_no_stall(engine_dir: Path, tmp_path: Path) -> None:
    """Longer than every silence that counts, and whoever watches runs again a second before who is watched. Without
    open streams: tritonserver 2.51 may end by itself when its timed locks pass their time meanwhile."""
    log = tmp_path / "log"
    with ServeProcess(engine_dir, "--log-file", str(log), program=FAKE) as running:
        before = answer(running)
        engine, server = engine_process(tritonserver(running).pid), tritonserver(running)
        watched = [process.pid for process in descendants(running.pid) if process != engine]
        os.kill(engine.pid, signal.SIGSTOP)
        time.sleep(1.0)  # its last beat is an old one when the others stop
        for pid in (*watched, running.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STANDSTILL_S)
        for pids in ([running.pid], watched, [engine.pid]):
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep(1.0)  # in which whoever watches looks several times
        assert running.health("live")[0] == 200
        assert running.health()[1]["reasons"] == [], log.read_text()
        assert answer(running) == before
        assert (engine_process(tritonserver(running).pid), tritonserver(running)) == (engine, server)
        assert running.health()[1]["restarts"] == 0
