"""The process of an engine that computes stops or dies in mid-step: its requests end, and another one takes over."""

import os
import signal

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.processes.facts import wait_gone
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.server import ENDLESS, WAIT_S, ask, engine_process, text_of, used_pages, wait_until

TEXT = "hello there"


def check_replaced(server: TritonServer, model: str, signum: signal.Signals, words: str) -> None:
    """A request that runs when the process gets the signal ends with these words; the next answers are as before."""
    before, old = text_of(server, ask("ensemble", TEXT, 8)), engine_process(server.pid)
    with StreamingClient(server.grpc_url) as client:
        prompt = TEXT if model == "ensemble" else [5, 6, 7]
        responses = client.generate(model, ask(model, prompt, ENDLESS))
        next(responses)
        os.kill(old.pid, signum)
        with pytest.raises(KvforgeError, match=words):
            for _ in responses:
                pass
    assert wait_gone([old], WAIT_S) == []
    assert text_of(server, ask("ensemble", TEXT, 8)) == before
    wait_until(lambda: used_pages(server) == 0, "all pages free")
    assert server.failure() is None


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_engine_killed(server: TritonServer, model: str) -> None:
    check_replaced(server, model, signal.SIGKILL, r"engine process ended unexpectedly .signal 9")


def test_engine_stopped(server: TritonServer) -> None:
    """With the allowance of an engine's own steps; test_stalls.py has every other way to stand still."""
    check_replaced(server, "ensemble", signal.SIGSTOP, "the engine stopped answering")
