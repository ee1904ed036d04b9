"""What is read from /proc about a server's processes."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from perf.serving.load.memory import slope_mib_per_hour
from perf.serving.load.processes import (
    TICK_S,
    CpuWindow,
    cpu_seconds,
    memory_of,
    role_of,
    server_processes,
    total_cpu_seconds,
)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["/opt/bin/tritonserver", "--http-port=1"], "tritonserver"),
        (["/b/python/triton_python_backend_stub", "/m/postprocessing/1/model.py", "x"], "stub of postprocessing"),
        (["python", "-m", "kvforge.serving.engine.process", "/e"], "engine"),
        (["python", "-m", "kvforge.gateway", "--engine", "/e"], "gateway"),
        ([""], "?"),
    ],
)
def test_roles(command: list[str], role: str) -> None:
    assert role_of(command) == role


def test_children_are_found_and_memory_is_read() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # the only child of this name
    try:
        assert child.pid in server_processes(os.getpid()).values()
        memory = memory_of(child.pid)
        assert memory is not None and 0 < memory.pss <= memory.rss
    finally:
        child.communicate(b"\n")
    assert memory_of(child.pid) is None and cpu_seconds(child.pid) == {}


def test_processor_time_between_two_moments() -> None:
    window = CpuWindow(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert sum(window.read()["client"]) >= 0.05


BUSY = """
import subprocess, sys, threading, time
def spend():
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
thread = threading.Thread(target=spend)
thread.start()
thread.join()
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.read(1)
print("x", end="", flush=True)
sys.stdin.read()
"""


def test_processor_time_of_a_server_counts_ended_threads_and_children(tmp_path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    server = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.read(1) == b"x"
        assert total_cpu_seconds(server.pid) >= 0.2 - 4 * TICK_S
    finally:
        server.communicate(b"")
    assert total_cpu_seconds(server.pid) == 0.0


def test_slope_of_memory_leaves_out_the_warm_up() -> None:
    times = np.arange(0.0, 3600.0, 5.0)
    grown = 100 + 6 * times / 3600
    grown[times < 600] -= 50
    assert slope_mib_per_hour(times, grown, warm_up_s=600) == pytest.approx(6.0)
    assert slope_mib_per_hour(times, grown, warm_up_s=0) > 20
    assert slope_mib_per_hour(times[:1], grown[:1], warm_up_s=0) is None
