"""Ports, acks, process facts, and the templates' place."""

import os
import queue
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.errors import KvforgeError, MissingToolError
from kvforge.serving import triton_install
from kvforge.serving.acks import AckListener, AckSender
from kvforge.serving.ports import choose_ports
from kvforge.serving.processes import children, descendants, process_id, processes_of, wait_gone
from kvforge.serving.repository import MODELS, repository_templates
from kvforge.serving.triton_install import find_triton


def test_free_ports_are_different_and_given_ones_are_kept() -> None:
    chosen = choose_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0})
    assert len(set(chosen.values())) == 3
    port = chosen["http"]
    assert choose_ports("127.0.0.1", {"http": port, "grpc": 0})["http"] == port


def test_the_same_port_twice_and_impossible_ports_are_refused() -> None:
    port = choose_ports("127.0.0.1", {"http": 0})["http"]
    with pytest.raises(KvforgeError, match="--grpc-port"):
        choose_ports("127.0.0.1", {"http": port, "grpc": port})
    with pytest.raises(KvforgeError, match="--http-port"):
        choose_ports("127.0.0.1", {"http": 70000})


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(KvforgeError, match=rf"127\.0\.0\.1:{port} .*--metrics-port"):
            choose_ports("127.0.0.1", {"http": 0, "metrics": port})


def test_acks_arrive_and_the_socket_goes(tmp_path: Path) -> None:
    path = tmp_path / "acks.sock"
    acks: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
    listener = AckListener(str(path), lambda key, cancelled: acks.put((key, cancelled)))
    sender = AckSender(str(path))
    sender.send(2**62 - 1, False)
    sender.send(3, True)
    assert [acks.get(timeout=30), acks.get(timeout=30)] == [(2**62 - 1, False), (3, True)]
    listener.close()
    assert not path.exists()
    sender.send(4, False)
    sender.close()
    assert acks.empty()


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


def test_a_servers_processes_are_known_by_its_pid_stubs_first(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text("input()")
    server, other = str(2**22 + 1), str(2**22 + 2)  # above any pid
    commands = [
        ["-c", "input()", "--server-pid", server, "--socket-fd", "3"],
        [str(script), "region", "1", "1", server, "0"],
        [str(script), "region", "1", "1", other, "0"],
        ["-c", "input()", "--server-pid", other, "--socket-fd", server],
        ["-c", "input()", server],
    ]
    started = [subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE) for command in commands]
    try:
        assert [process.pid for process in processes_of(int(server))] == [started[1].pid, started[0].pid]
        assert {process.pid for process in processes_of(int(other))} == {started[2].pid, started[3].pid}
    finally:
        for process in started:
            process.communicate(b"\n")
    assert processes_of(int(server)) == []


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
