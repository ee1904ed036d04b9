"""Ports, process facts, and the templates' place."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvforge.common.addresses import Address, find_address
from kvforge.common.errors import KvforgeError, MissingToolError
from kvforge.serving.processes import facts, listeners
from kvforge.serving.processes.facts import (
    STUB,
    ProcessId,
    children,
    descendants,
    kill_all,
    process_id,
    processes_of,
    programs_below,
    wait_gone,
)
from kvforge.serving.processes.listeners import accepts, listened_ports
from kvforge.serving.processes.run_dir import cannot_write_run_dir, make_run_dir
from kvforge.serving.server import triton_install
from kvforge.serving.server.ports import choose_ports
from kvforge.serving.server.repository import MODELS, repository_templates
from kvforge.serving.server.triton_install import TritonInstall, find_triton
from tests.support.models.checkpoints import write_byte_tokenizer


def on_loopback(**ports: int) -> dict[str, tuple[Address, int]]:
    return {name: (find_address("127.0.0.1"), port) for name, port in ports.items()}


def test_free_ports_are_different_and_given_ones_are_kept() -> None:
    chosen = choose_ports(on_loopback(http=0, grpc=0, metrics=0))
    assert len(set(chosen.values())) == 3
    port = chosen["http"]
    assert choose_ports(on_loopback(http=port, grpc=0))["http"] == port


def test_the_same_port_twice_and_impossible_ports_are_refused() -> None:
    port = choose_ports(on_loopback(http=0))["http"]
    with pytest.raises(KvforgeError, match="--grpc-port"):
        choose_ports(on_loopback(http=port, grpc=port))
    with pytest.raises(KvforgeError, match="--http-port"):
        choose_ports(on_loopback(http=70000))


def test_a_port_can_serve_two_doors_at_different_addresses() -> None:
    port = choose_ports(on_loopback(http=0))["http"]
    doors = {**on_loopback(http=port), "openai": (find_address("127.0.0.2"), port)}
    assert choose_ports(doors) == {"http": port, "openai": port}


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(KvforgeError, match=rf"127\.0\.0\.1:{port} .*--metrics-port"):
            choose_ports(on_loopback(http=0, metrics=port))


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_listens_on_a_port(family: socket.AddressFamily, address: str) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.socket(family) as ours:
        try:
            ours.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} here")
        port = ours.getsockname()[1]
        urls = [f"http://{address}:{port}/metrics", f"{address}:{port}"]
        if family == socket.AF_INET6:
            urls = [url.replace(address, f"[{address}]") for url in urls]
        assert port not in listened_ports(os.getpid())  # not yet
        assert not any(map(accepts, urls))
        ours.listen()
        assert port in listened_ports(os.getpid())
        assert port not in listened_ports(other.pid)
        assert all(map(accepts, urls))
    other.communicate()


def test_where_the_system_does_not_say_who_listens_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(table: str) -> dict[str, int]:
        raise PermissionError

    monkeypatch.setattr(listeners, "_listening", hidden)
    assert listened_ports(os.getpid()) is None


def test_no_folder_for_temporary_files_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(OSError, match="No usable") as caught:
        make_run_dir()
    assert cannot_write_run_dir(caught.value) == (
        "No usable temporary directory found in ['/tmp', '/var/tmp']: set TMPDIR to a folder that the server's files "
        "can be written to"
    )


def test_process_ids_tell_a_living_process_from_a_gone_one() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (found,) = [p for p in children(os.getpid()) if p.pid == child.pid]
    assert found in descendants(os.getpid())
    assert found == process_id(child.pid)
    assert found.is_alive()
    found.kill()
    assert wait_gone([found], timeout_s=30) == []
    child.communicate()
    assert process_id(child.pid) is None


def test_killed_processes_leave_no_shared_memory() -> None:
    """Python's tracker removes it, which is one of the processes."""
    made = "m = SharedMemory(create=True, size=8)"
    program = f"from multiprocessing.shared_memory import SharedMemory\n{made}\nprint(m.name)\ninput()"
    parent = subprocess.Popen([sys.executable, "-uc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    region = Path("/dev/shm") / parent.stdout.readline().decode().strip()
    started = [*filter(None, [process_id(parent.pid)]), *descendants(parent.pid)]
    assert region.is_file() and len(started) == 2
    while b"resource_tracker" not in Path(f"/proc/{started[1].pid}/cmdline").read_bytes():  # it has not begun yet
        time.sleep(0.01)
    kill_all(started)
    parent.communicate()
    assert wait_gone(started, timeout_s=30) == [] and not region.exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ProcessId]]:
    """Starts a process that waits, under the name and with the words given; MODEL stands for a stub's model.py."""
    script = tmp_path / "model.py"
    script.write_text("input()")
    started: list[subprocess.Popen] = []

    def start(name: str, *words: str) -> ProcessId:
        command = [name, *(str(script) if word == MODEL else word for word in words)]
        started.append(subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE))
        words_file = Path(f"/proc/{started[-1].pid}/cmdline")
        while not words_file.read_bytes().startswith(name.encode() + b"\0"):  # a moment into exec it has none yet
            assert started[-1].poll() is None
        found = process_id(started[-1].pid)
        assert found is not None
        return found

    yield start
    for process in started:
        process.communicate(b"\n")


MODEL = "model.py"
SERVER, OTHER = 2**22 + 1, 2**22 + 2
"""Above any pid."""


def stub_words(server_pid: int) -> tuple[str, ...]:
    return (STUB, MODEL, "region", "1", "1", str(server_pid), "0")


def test_a_servers_processes_are_known_by_its_pid_stubs_first(start: Callable[..., ProcessId]) -> None:
    server, other = str(SERVER), str(OTHER)
    engine = start("python", "-c", "input()", "--server-pid", server, "--socket-fd", "3")
    stub = start(*stub_words(SERVER))
    others = {
        start(*stub_words(OTHER)),
        start("python", "-c", "input()", "--server-pid", other, "--socket-fd", server),
    }
    start("python", "-c", "input()", server)
    start("python", *stub_words(SERVER)[1:])  # somebody's program whose words look like a stub's
    assert processes_of(SERVER, None) == [stub, engine]
    assert set(processes_of(OTHER, None)) == others


def test_programs_below_a_run_directory_are_known_by_their_words(
    start: Callable[..., ProcessId], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    for name in ("run", "run2"):
        (tmp_path / name).mkdir()
        write_byte_tokenizer(tmp_path / name)
    worker = start("python", "-m", "kvforge.runtime.guides.worker", f"{run_dir}/", "2")
    start("python", "-m", "kvforge.runtime.guides.worker", f"{run_dir}2/", "2")
    start("python", "-c", "input()", f"{run_dir}/somebody's")
    assert programs_below(run_dir) == [worker]


def test_the_processes_of_who_got_a_servers_pid_later_are_not_the_servers(start: Callable[..., ProcessId]) -> None:
    old = start(*stub_words(os.getpid()))
    assert processes_of(os.getpid(), None) == []  # whoever has the pid now was there before the stub
    assert processes_of(os.getpid(), process_id(os.getpid())) == [old]
    assert processes_of(os.getpid(), ProcessId(os.getpid(), 1)) == []


def test_a_pid_of_another_container_is_another(
    start: Callable[..., ProcessId], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = start(*stub_words(SERVER))
    assert processes_of(SERVER, None) == [stub]
    spaces = {str(stub.pid): "pid:[2]", "self": "pid:[1]"}
    monkeypatch.setattr(facts, "_pid_namespace", lambda pid: spaces.get(pid, "pid:[1]"))
    assert processes_of(SERVER, None) == []


def test_a_stub_knows_its_server_though_that_has_ended(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text("from kvforge.serving.processes.facts import server_of_stub\nprint(server_of_stub())")
    stub = [str(script) if word == MODEL else word for word in stub_words(SERVER)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for words, expected in ((stub, SERVER), (["python", *stub[1:]], os.getpid())):
        told = subprocess.run(words, executable=sys.executable, env=environment, capture_output=True, check=True)
        assert int(told.stdout) == expected


def test_templates_are_complete() -> None:
    root = repository_templates()
    assert all((root / model / "config.pbtxt").is_file() for model in MODELS)


def test_no_tritonserver_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(triton_install.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingToolError, match="no Triton Inference Server found: install"):
        find_triton()


def test_tritonserver_on_path_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_triton()
    assert found.binary == binary
    assert found.make_backend_dir(tmp_path / "backends") is None


def test_a_folder_where_no_program_runs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "backends" / "python").mkdir(parents=True)
    (tmp_path / STUB).write_text("")
    (tmp_path / STUB).chmod(0o755)
    install = TritonInstall(tmp_path / "tritonserver", (), tmp_path / "backends", tmp_path / STUB)
    target = tmp_path / "folder" / "run" / "backends"
    assert install.make_backend_dir(target) == target
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.X_OK)
    other = tmp_path / "noexec" / "run" / "backends"
    with pytest.raises(KvforgeError, match=rf"^{tmp_path}/noexec is mounted noexec, .*: set TMPDIR to another folder$"):
        install.make_backend_dir(other)
