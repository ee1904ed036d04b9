"""`kvforge serve` after its processes are killed: errors for open requests, and the same server again."""

import contextlib
import json
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.processes.facts import ProcessId, children, descendants, model_of_stub, wait_gone
from kvforge.serving.server.repository import MODELS
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import ENDLESS, ask, wait_until

SHARED_MEMORY = Path("/dev/shm")
RESTART_TIMEOUT_S = 120.0
WINDOW_S = "3600"
"""In which all deaths of a test fall, however busy the machine: those of 300 s before would be forgotten."""
QUICK = ("postprocessing", "gateway")


def child(running: ServeProcess, name: bytes) -> ProcessId:
    """tritonserver or the gateway."""
    started = children(running.pid)
    (found,) = [process for process in started if name in Path(f"/proc/{process.pid}/cmdline").read_bytes()]
    return found


def tritonserver(running: ServeProcess) -> ProcessId:
    return child(running, b"tritonserver")


def run_dir(running: ServeProcess) -> Path:
    words = Path(f"/proc/{tritonserver(running).pid}/environ").read_bytes().split(b"\0")
    (found,) = [word.removeprefix(b"KVFORGE_RUN_DIR=") for word in words if word.startswith(b"KVFORGE_RUN_DIR=")]
    return Path(found.decode())


def victim(running: ServeProcess, name: str) -> ProcessId:
    if name in ("tritonserver", "gateway"):
        return child(running, name.encode())
    (found,) = [stub for stub in children(tritonserver(running).pid) if model_of_stub(stub) == name]
    return found


def is_missed(running: ServeProcess, num_restarts: int) -> bool:
    """Whether readiness is withdrawn, or was: a look may come after the restart."""
    status, report = running.health()
    return status == 503 or report["restarts"] >= num_restarts


def restarts(running: ServeProcess) -> int:
    return running.health()[1]["restarts"]


def answer(running: ServeProcess) -> str:
    with StreamingClient(running.grpc_url) as client:
        return "".join(response.text for response in client.generate("ensemble", ask("ensemble", "hello there", 12)))


def openai_answer(running: ServeProcess) -> str:
    body = {"model": "served", "prompt": "hello there", "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{running.openai_url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def open_streams(running: ServeProcess, errors: list[str]) -> list[threading.Thread]:
    """An endless request per model, each read until its error, which goes to `errors`."""
    started = [threading.Event(), threading.Event()]

    def read(index: int, model: str, prompt: list[int] | str) -> None:
        try:
            with StreamingClient(running.grpc_url) as client:
                for _ in client.generate(model, ask(model, prompt, ENDLESS)):
                    started[index].set()
        except KvforgeError as error:
            errors.append(str(error))

    prompts = [("ensemble", "hello there"), ("tensorrt_llm", [5, 6, 7])]
    threads = [threading.Thread(target=read, args=(i, *args), daemon=True) for i, args in enumerate(prompts)]
    for thread in threads:
        thread.start()
    assert all(event.wait(RESTART_TIMEOUT_S) for event in started)
    return threads


def regions() -> set[str]:
    return {region.name for region in SHARED_MEMORY.iterdir() if region.name.startswith("kvforge_")}


@contextlib.contextmanager
def shown_on_failure(log: Path) -> Iterator[None]:
    """Print a server's log if what is done meanwhile fails."""
    try:
        yield
    except BaseException:
        print(log.read_text(errors="replace") if log.exists() else f"no {log}", file=sys.stderr)
        raise


def test_killed_processes_are_replaced(engine_dir: Path, tmp_path: Path, full: bool) -> None:
    models = [model for model in MODELS if model != "ensemble"]
    victims = [*models, "tritonserver", "gateway"] if full else QUICK
    # A start that stands still is given up and counts, too.
    max_restarts = len(victims) + 1
    options = ["--openai", "--openai-port", "0", "--served-model-name", "served", "--max-restarts", str(max_restarts)]
    options += ["--restart-window", WINDOW_S]
    log = tmp_path / "log"
    with shown_on_failure(log), ServeProcess(engine_dir, *options, "--log-file", str(log), program=FAKE) as running:
        running.wait_ready("a ready server")
        prefix = f"kvforge_{running.pid}_"
        before = answer(running)
        assert openai_answer(running) == before
        for name in victims[:-1]:
            count = restarts(running) + 1
            old = [tritonserver(running), *descendants(tritonserver(running).pid)]
            old_dir = run_dir(running)
            old_regions = {region for region in regions() if region.startswith(prefix)}
            errors: list[str] = []
            threads = open_streams(running, errors)
            victim(running, name).kill()
            wait_until(lambda count=count: is_missed(running, count), f"{name} missed", RESTART_TIMEOUT_S)
            for thread in threads:
                thread.join(RESTART_TIMEOUT_S)
            assert len(errors) == 2, (name, errors)
            running.wait_ready(f"a server after {name} died")
            assert answer(running) == openai_answer(running) == before
            assert restarts(running) >= count
            assert wait_gone(old, timeout_s=RESTART_TIMEOUT_S) == []
            assert old_regions and not old_regions & regions()
            assert run_dir(running).is_dir() and not old_dir.exists()
        count = restarts(running) + 1
        victim(running, "gateway").kill()
        wait_until(lambda: is_missed(running, count), "the gateway missed", RESTART_TIMEOUT_S)
        running.wait_ready("a new gateway")
        assert openai_answer(running) == before
        with urllib.request.urlopen(f"{running.openai_url.removesuffix('/v1')}/page/metrics", timeout=60) as numbers:
            assert b"kvforge_engine_ready" in numbers.read(), "the page has its numbers again"
        # One death more than the policy allows ends the command, with the reason.
        for count in range(restarts(running) + 1, max_restarts + 1):
            tritonserver(running).kill()
            wait_until(lambda count=count: is_missed(running, count), "tritonserver missed", RESTART_TIMEOUT_S)
            running.wait_ready("a server after tritonserver died")
        last = [tritonserver(running), *descendants(tritonserver(running).pid)]
        last_dir = run_dir(running)
        tritonserver(running).kill()
        status, stderr = running.wait()
    assert status == 1
    assert (
        f"tritonserver ended (signal 9), after {max_restarts} restarts within {WINDOW_S} s" in stderr.splitlines()[-1]
    )
    assert wait_gone(last, timeout_s=RESTART_TIMEOUT_S) == []
    assert not {region for region in regions() if region.startswith(prefix)}
    assert not last_dir.exists()


def test_a_killed_launcher_takes_its_server_along(engine_dir: Path) -> None:
    with ServeProcess(engine_dir, "--no-restart", program=FAKE) as running:
        processes = descendants(running.pid)
        prefix = f"kvforge_{running.pid}_"
        folder = run_dir(running)
        assert folder.is_dir() and any(region.startswith(prefix) for region in regions())
        running.signal(signal.SIGKILL)
        running.wait()
        assert wait_gone(processes, timeout_s=RESTART_TIMEOUT_S) == []
    wait_until(lambda: not folder.exists(), "the run directory gone")
    assert not any(region.startswith(prefix) for region in regions())
