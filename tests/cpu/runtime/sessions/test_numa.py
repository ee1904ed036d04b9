"""Weights and pools lie on all NUMA nodes in turn."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.runtime.sessions import huge_pages, numa
from kvforge.runtime.sessions.huge_pages import huge_page_memory

DEFAULT, BIND, INTERLEAVE = 0, 2, 3  # of Linux's uapi/linux/mempolicy.h
can_set = pytest.mark.skipif(numa.policy_of(None) != DEFAULT, reason="needs Linux's memory policies, none of them set")


def machine(folder: Path, nodes: dict[int, str], has_memory: str) -> Path:
    (folder / "has_memory").write_text(f"{has_memory}\n")
    for node, cpus in nodes.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    return folder


@pytest.mark.parametrize(
    ("allowed", "nodes", "has_memory", "expected"),
    [
        ({0, 1, 64}, {0: "0-31,64-95", 1: "32-63,96-127"}, "0-1", [0]),
        ({0, 40}, {0: "0-31,64-95", 1: "32-63,96-127"}, "0-1", [0, 1]),
        ({0, 40}, {0: "0-31", 1: "32-63", 2: ""}, "0-2", [0, 1]),  # memory alone, as CXL's
        ({0, 40}, {0: "0-31", 3: "32-63"}, "0,3", [0, 3]),
        ({0, 40}, {0: "0-63"}, "0", [0]),
        ({0, 40}, {0: "0-63"}, "", []),
    ],
)
def test_nodes_are_those_whose_cpus_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], nodes: dict, has_memory: str, expected: list
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    assert numa.nodes_in_use(machine(tmp_path, nodes, has_memory)) == expected


def test_a_machine_that_does_not_say_has_none(tmp_path: Path) -> None:
    assert numa.nodes_in_use(tmp_path / "none") == []
    assert numa.nodes_in_use(machine(tmp_path, {0: "no numbers"}, "0")) == []


@can_set
def test_memory_of_several_nodes_is_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may have one node; the policy is Linux's own word."""
    plain = huge_page_memory(5 << 20)
    assert len(numa.nodes_in_use()) > 1 or numa.policy_of(plain.data_ptr()) == DEFAULT
    monkeypatch.setattr(huge_pages.numa, "nodes_in_use", lambda: [0, 1])
    spread = huge_page_memory(5 << 20)
    assert numa.policy_of(spread.data_ptr()) == numa.policy_of(spread.data_ptr() + (4 << 20)) == INTERLEAVE
    assert spread.fill_(3).sum() == 15 << 20 and numa.policy_of(plain.data_ptr()) == DEFAULT


@can_set
def test_nodes_that_are_not_there_change_nothing() -> None:
    memory = huge_page_memory(2 << 20)
    assert not numa.interleave(memory.data_ptr(), 2 << 20, [1023])
    assert memory.fill_(1).sum() == 2 << 20


@can_set
def test_a_policy_that_the_process_was_started_with_stays() -> None:
    """As ``numactl`` starts it: the policy is inherited."""
    code = (
        "import ctypes, platform\n"
        "number = {'x86_64': 238, 'aarch64': 237}[platform.machine()]\n"
        "nodes = ctypes.c_ulong(1)\n"
        f"assert ctypes.CDLL(None).syscall(number, {BIND}, ctypes.byref(nodes), ctypes.c_ulong(64)) == 0\n"
        "from kvforge.runtime.sessions import huge_pages, numa\n"
        "numa.nodes_in_use = lambda: [0, 1]\n"
        "memory = huge_pages.huge_page_memory(2 << 20)\n"
        "print(numa.policy_of(memory.data_ptr()), numa.policy_of(None))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == f"{DEFAULT} {BIND}\n"  # memory without a policy has the process's
