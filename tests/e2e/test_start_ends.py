"""A start that fails in any stage ends, of itself: the first cause in one sentence, and nothing is left."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.common.addresses import LOOPBACK, find_address
from kvforge.serving.server.launcher import START_ATTEMPTS
from kvforge.serving.server.ports import choose_ports
from kvforge.serving.server.repository import MODELS
from tests.support.serving.serve_process import FREE_OPENAI, FREE_PORTS, without_notes

ROOT = Path(__file__).parents[2]
MOUNTS = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files; its path is short enough for a socket, and no other process knows it."""
    path = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def left_processes(folder: Path) -> list[str]:
    """The command lines of those that were started with this folder for temporary files."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in environ.read_bytes().split(b"\0"):
                found.append(environ.with_name("cmdline").read_bytes().decode())
        except OSError:  # another user's, or one that has ended
            continue
    return found


def failed_start(stage: str, folder: Path, engine_dir: Path, *options: str, mount: str | None = None) -> str:
    """What the command says, once it has ended as it should. `mount`: what is mounted for it alone."""
    ports = FREE_OPENAI if "--openai" in options else FREE_PORTS
    command = [sys.executable, "-m", "tests.support.serving.failing_start", stage, str(engine_dir)]
    command += [*ports, *options]
    if mount is not None:
        if not MOUNTS:
            pytest.skip("nothing can be mounted here")
        command = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {mount} && exec "$@"', "sh", *command]
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, said) == (1, ""), errors
    lines = without_notes(errors).splitlines(keepends=True)
    errors = "".join(line for line in lines if "; starting it once more" not in line)  # a busy machine crashes Triton
    assert errors.startswith("kvforge: error: ") and errors.count("\n") == 1, errors
    assert left_processes(folder) == []
    assert list(folder.iterdir()) == []
    assert not list(Path("/dev/shm").glob(f"kvforge_{process.pid}_*"))
    return errors.removeprefix("kvforge: error: ").strip()


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_raises(model: str, folder: Path, engine_dir: Path) -> None:
    """The others load for as long as they want."""
    assert failed_start(f"raises:{model}", folder, engine_dir) == (
        f"the server did not start: model '{model}' failed to load: ModuleNotFoundError: No module named "
        "'nothing_of_this_name'"
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_stub_that_is_killed(model: str, folder: Path, engine_dir: Path) -> None:
    assert failed_start(f"dies:{model}", folder, engine_dir) == (
        f"the server did not start: the process of model '{model}' ended while it loaded"
    )


@pytest.mark.parametrize("model", ["postprocessing", "ensemble"])
def test_a_stub_that_dies_after_it_has_loaded(model: str, folder: Path, engine_dir: Path) -> None:
    """The first request needs `ensemble`, and no other."""
    errors = failed_start(f"dies-later:{model}", folder, engine_dir)
    assert errors == f"the server did not start: the process of model '{model}' ended"


def test_a_model_whose_configuration_cannot_be_read(folder: Path, engine_dir: Path) -> None:
    errors = failed_start("unreadable:preprocessing", folder, engine_dir)
    assert errors.startswith(
        "the server did not start: model 'preprocessing' failed to load: failed to read text proto"
    )


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("engine:exits", "the engine process ended unexpectedly (exit status 7)"),
        ("engine:killed", "the engine process ended unexpectedly (signal 9)"),
        (
            "engine:absent",
            "the engine process cannot be started: [Errno 2] No such file or directory: '/nowhere'",
        ),
        ("server:SIGKILL", "tritonserver ended (signal 9)"),
        ("server:SIGTERM", "tritonserver ended (signal 15)"),
        ("server:exits", "its log is empty"),
    ],
)
def test_a_process_that_ends(stage: str, words: str, folder: Path, engine_dir: Path) -> None:
    assert failed_start(stage, folder, engine_dir) == f"the server did not start: {words}"


def test_a_server_that_crashes_again(folder: Path, engine_dir: Path, tmp_path: Path) -> None:
    """But for the last time it is started once more, which a log tells of."""
    log = tmp_path / "log"
    errors = failed_start("server:SIGABRT", folder, engine_dir, "--log-file", str(log))
    assert errors.startswith("the server did not start: ") and errors.endswith("tritonserver ended (signal 6)")
    assert log.read_text().count("; starting it once more") == START_ATTEMPTS - 1


@pytest.mark.parametrize(("end", "words"), [("exits", "no room"), ("killed", "it ended (signal 9)")])
def test_the_gateway(end: str, words: str, folder: Path, engine_dir: Path, tmp_path: Path) -> None:
    options = ["--openai", "--openai-port", "0", "--log-file", str(tmp_path / "log")]
    errors = failed_start(f"gateway:{end}", folder, engine_dir, *options)
    assert errors == f"the OpenAI gateway did not start: {words}"


@pytest.mark.parametrize("name", ["http", "grpc", "metrics", "health", "openai"])
def test_a_port_that_is_taken(name: str, folder: Path, engine_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--openai", "--openai-port", "0"] if name == "openai" else []
        errors = failed_start("", folder, engine_dir, *options, f"--{name}-port", str(port))
    assert str(port) in errors and f"--{name}-port" in errors


@pytest.mark.parametrize("how", ["silent-http", "silent-grpc", "silent-metrics", "answers-http", "answers-metrics"])
def test_a_port_that_another_process_has_when_the_server_wants_it(how: str, folder: Path, engine_dir: Path) -> None:
    """Whether that one answers as a server that is ready, or not at all."""
    name = how.partition("-")[2]
    port = choose_ports({name: (find_address(LOOPBACK), 0)})[name]
    errors = failed_start(f"port:{how}", folder, engine_dir, f"--{name}-port", str(port))
    assert errors.startswith("the server did not start: another process ") and str(port) in errors
    assert errors.endswith(f"; choose another with --{name}-port, or 0 for any free port")


@pytest.mark.parametrize(("mount", "why"), [("size=2m", "No space left on device"), ("ro", "Read-only file system")])
def test_no_shared_memory(mount: str, why: str, folder: Path, engine_dir: Path) -> None:
    errors = failed_start("", folder, engine_dir, mount=f"{mount} tmpfs /dev/shm")
    assert errors.startswith(f"the server did not start: /dev/shm has no room for a megabyte a model ({why})")


def test_a_folder_where_no_program_runs(folder: Path, engine_dir: Path) -> None:
    errors = failed_start("", folder, engine_dir, mount=f"noexec tmpfs {folder}")
    assert errors == f"{folder} is mounted noexec, so that no program there runs: set TMPDIR to another folder"
