"""The engine's wall clock jumps by a day in mid-stream, forth and back: no answer and no deadline notices."""

import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from kvforge.serving.client import StreamingClient
from kvforge.serving.engine.command import process_command
from kvforge.serving.processes.run_dir import STALE_AFTER_S
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.options import ServerOptions
from tests.e2e.test_operations_restart import answer, open_streams, openai_answer, tritonserver
from tests.e2e.test_stalls import OPENAI, probes
from tests.support.fuzz.known import KnownAnswers
from tests.support.fuzz.run import check_answer, processes, unharmed
from tests.support.fuzz.wire import Grpc
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import ask, engine_process, started, wait_until

SOURCE = Path(__file__).resolve().parents[1] / "support" / "serving" / "clock_shim.cpp"
DAY_S = 86400
PROMPT, NUM_TOKENS = "what time is it", 600
WATCHED_S = 1.2 * STALE_AFTER_S
"""How long the probes are asked after each jump: longer than any silence that counts."""
READY = [200, 200, 200]
STEP_S = "0.05"
"""Streams that are watched for so long need no more of a machine."""


@dataclass(frozen=True)
class Clock:
    """The wall clock of processes started with `environment`."""

    shim: Path
    offset: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.shim), "CLOCK_SHIM_FILE": str(self.offset)}

    def set(self, seconds: int) -> None:
        """That many seconds after the true time."""
        with self.offset.open("r+b") as file:
            file.write(struct.pack("=q", seconds))


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    folder = tmp_path_factory.mktemp("clock")
    clock = Clock(folder / "clock_shim.so", folder / "offset")
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", clock.shim, SOURCE, "-ldl"], check=True)
    clock.offset.write_bytes(struct.pack("=q", 0))
    return clock


@pytest.fixture(scope="module")
def own_server(engine_dir: Path, clock: Clock) -> Iterator[TritonServer]:
    """Only the engine's process has the clock: gRPC in tritonserver takes a clock that the kernel does not share for
    a broken one."""
    environment = (f"{name}={value}" for name, value in clock.environment.items())
    command = ("env", *environment, *process_command(engine_dir))
    with started(TritonServer(engine_dir, ServerOptions(kv_cache_gib=0.1, engine_command=command))) as running:
        yield running


def test_the_shim(clock: Clock) -> None:
    clock.set(DAY_S)
    code = "import time; print(time.time())"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **clock.environment},
    )
    clock.set(0)
    assert abs(float(told.stdout) - time.time() - DAY_S) < 600


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_jumps(own_server: TritonServer, llm: LLM, clock: Clock, model: str) -> None:
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in processes(own_server)]
    assert sum("clock_shim.so" in text for text in maps) == 1
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (whole,) = llm.generate([PROMPT], params, use_tqdm=False)
    known, rng, other = KnownAnswers(llm), random.Random(model), Grpc(own_server.grpc_url)
    prompt = list(whole.prompt_token_ids) if model == "tensorrt_llm" else PROMPT
    names = ask("tensorrt_llm" if model == "tensorrt_llm" else "ensemble", prompt, NUM_TOKENS, end_id=-1)
    tokens, text = [], ""
    with unharmed(own_server), StreamingClient(own_server.grpc_url) as client:
        for count, response in enumerate(client.generate(model, names)):
            if model == "tensorrt_llm":
                tokens += response.token_ids
            else:
                text += response.text
            if count in (3, 6, 9):
                clock.set({3: DAY_S, 6: -DAY_S, 9: 0}[count])
                case = known.good(rng, "ensemble")
                check_answer(case, other.stream(case))
    other.close()
    assert (tokens if model == "tensorrt_llm" else text) == (
        list(whole.outputs[0].token_ids) if model == "tensorrt_llm" else whole.outputs[0].text
    )


def test_every_process_but_tritonserver_at_another_time(engine_dir: Path, clock: Clock) -> None:
    """kvforge serve, the stubs, the engine and the gateway: no probe fails and nothing is replaced. A busy machine may
    hold a process up once for longer than ``STALE_AFTER_S``; a jump that is noticed would be so each time."""
    environment = {**os.environ, **clock.environment, "CLOCK_SHIM_EXCEPT": "tritonserver"}
    with ServeProcess(engine_dir, *OPENAI, "--step-s", STEP_S, env=environment, program=FAKE) as running:
        wait_until(lambda: probes(running) == READY, "a ready server")
        before, engine = answer(running), engine_process(tritonserver(running).pid)
        errors: list[str] = []
        threads, lapses = open_streams(running, errors), 0
        for jump_s in (DAY_S, -DAY_S, 0):
            clock.set(jump_s)
            until = time.monotonic() + WATCHED_S
            while time.monotonic() < until:
                if probes(running) != READY:
                    lapses += 1
                    wait_until(lambda: probes(running) == READY, "a server that is ready again")
                time.sleep(0.1)
            assert answer(running) == openai_answer(running) == before
        assert engine_process(tritonserver(running).pid) == engine and running.health()[1]["restarts"] == 0
        assert lapses <= 1 and not errors and all(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_the_server_goes_on_at_another_time(own_server: TritonServer, llm: LLM, clock: Clock, jump_s: int) -> None:
    """A deadline of half a minute that began before the jump holds no more and no less than that."""
    known, rng, connection = KnownAnswers(llm), random.Random(jump_s), Grpc(own_server.grpc_url)
    with unharmed(own_server):
        clock.set(jump_s)
        for model in ["ensemble", "tensorrt_llm"] * 5:
            case = known.good(rng, model)
            case.parameters["timeout"] = 30_000_000
            check_answer(case, connection.stream(case))
        clock.set(0)
        case = known.good(rng, "ensemble")
        check_answer(case, connection.stream(case))
    connection.close()
