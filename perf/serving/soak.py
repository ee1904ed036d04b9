"""Minutes of mixed traffic at a bounded rate: every answer compared with the offline one, memory watched.

    python -m perf.serving.soak [--minutes 30] [--rate 5] [--output RESULT]

Traffic: `ensemble`, `tensorrt_llm` and `tensorrt_llm_bls` over gRPC streams, `generate` and `generate_stream` over
HTTP, the gateway's completions; greedy and sampled with seeds; some cancelled halfway, some that must be refused.
Exits with 1 on a wrong, missing or refused answer, a bad request that was not refused, a page in use at the end, or
a process that ended.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvforge.demo.run import STUDENT
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from perf.harness.experiment import Experiment, engine_place, flag, option, output, place, positive_float, seed, work
from perf.harness.tables import text_table
from perf.serving.load.cases import BAD_TEXT, BAD_TOKENS, Case, make_cases
from perf.serving.load.client import ERROR, Answer, LoadClient, ask_text, ask_tokens, infer_request
from perf.serving.load.engines import tiny_engine
from perf.serving.load.gateway import Gateway, run_gateway
from perf.serving.load.http import completion_text, ensemble_text, post
from perf.serving.load.memory import MemoryLog, plot_memory
from perf.serving.load.processes import GATEWAY, server_processes

KV_CACHE_GIB = 0.125
"""Small, so that prompts push each other's pages out and the cache is filled within the warm-up."""
NUM_CASES = 200
MAX_OPEN = 16
ANSWER_TIMEOUT_S = 120.0
USED_PAGES = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"}'


@dataclass
class Tally:
    """What was asked and what went wrong; a few of the wrong ones in words."""

    asked: Counter = field(default_factory=Counter)
    cancelled: int = 0
    refused: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.wrong += 1
        if len(self.examples) < 10:
            self.examples.append(what)


class Soak:
    """One server under traffic until a moment in time."""

    def __init__(self, server: TritonServer, gateway: Gateway | None, cases: list[Case], seed: int) -> None:
        self._server, self._gateway, self._cases = server, gateway, cases
        self._rng = random.Random(seed)
        self._client = LoadClient(server.grpc_url, num_connections=4)
        self._paths = ["ensemble", "tensorrt_llm", "generate", "generate_stream"]
        self._paths += ["tensorrt_llm_bls"] if _is_served(server, "tensorrt_llm_bls") else []
        self._paths += ["completions"] if gateway else []
        self.tally = Tally()

    async def run(self, seconds: float, rate: float) -> None:
        """Send ``rate`` requests a second at random moments, at most MAX_OPEN open; wait for the last answers."""
        started, gate, tasks = time.monotonic(), asyncio.Semaphore(MAX_OPEN), set()
        told = started
        while (now := time.monotonic()) - started < seconds:
            await gate.acquire()
            task = asyncio.create_task(self._one(gate))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if now - told >= 30:
                told = now
                self._tell(now - started)
            if self._server.failure():
                print(f"  the server failed after {now - started:.0f} s", file=sys.stderr, flush=True)
                break
            await asyncio.sleep(self._rng.expovariate(rate))
        await asyncio.gather(*tasks)
        await self._client.close()

    def _tell(self, seconds: float) -> None:
        tally = self.tally
        print(
            f"  {seconds / 60:.1f} min: {tally.asked.total()} requests, {tally.cancelled} cancelled, "
            f"{tally.refused} refused as due, {tally.wrong} wrong",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    async def _one(self, gate: asyncio.Semaphore) -> None:
        kind = self._rng.random()
        try:
            if kind < 0.1:
                await asyncio.wait_for(self._ask_bad(), ANSWER_TIMEOUT_S)
            else:
                cancel_after = self._rng.randint(1, 6) if kind < 0.25 else None
                case, path = self._rng.choice(self._cases), self._rng.choice(self._paths)
                await asyncio.wait_for(self._ask(case, path, cancel_after), ANSWER_TIMEOUT_S)
        except asyncio.TimeoutError:
            self.tally.fail(f"a request was not answered in {ANSWER_TIMEOUT_S:.0f} s")
        except Exception as error:
            self.tally.fail(f"{type(error).__name__}: {error}")
        finally:
            gate.release()

    async def _ask(self, case: Case, path: str, cancel_after: int | None) -> None:
        self.tally.asked[path] += 1
        answer = await self._send(case, path, cancel_after)
        got: Any = tuple(answer.token_ids) if path == "tensorrt_llm" else b"".join(answer.pieces)
        due: Any = case.token_ids if path == "tensorrt_llm" else case.text.encode()
        if answer.code == "CANCELLED" and cancel_after is not None:
            self.tally.cancelled += 1
            if got != due[: len(got)]:
                self.tally.fail(f"{path}, cancelled: {got!r} does not begin {due!r}")
        elif answer.code != "OK":
            self.tally.fail(f"{path}: {answer.code} {answer.message}")
        elif got != due:
            self.tally.fail(f"{path}: {got!r} where {due!r} is right")

    async def _send(self, case: Case, path: str, cancel_after: int | None) -> Answer:
        if path == "tensorrt_llm":
            renamed = {f"runtime_{k}" if k.startswith("top") else k: v for k, v in case.sampling.items()}
            inputs = ask_tokens(case.prompt_ids, case.max_tokens, end_id=-1, **renamed)
            return await self._client.ask(infer_request(path, inputs, "output_ids"), cancel_after)
        text = ask_text(case.prompt, case.max_tokens, end_id=-1, **case.sampling)
        if path in ("ensemble", "tensorrt_llm_bls"):
            return await self._client.ask(infer_request(path, text, "text_output"), cancel_after)
        if path == "completions":
            assert self._gateway is not None
            body = {
                "model": self._gateway.model, "prompt": case.prompt, "max_tokens": case.max_tokens, "stream": True,
                "ignore_eos": True, **(case.sampling or {"temperature": 0.0}),
            }  # fmt: skip
            return await asyncio.to_thread(
                post, f"{self._gateway.url}/v1/completions", body, completion_text, cancel_after
            )
        body = {**text, "stream": path == "generate_stream"}
        url = f"{self._server.http_url}/v2/models/ensemble/{path}"
        return await asyncio.to_thread(post, url, body, ensemble_text, cancel_after)

    async def _ask_bad(self) -> None:
        self.tally.asked["bad"] += 1
        if self._rng.random() < 0.5:
            request = infer_request("ensemble", self._rng.choice(BAD_TEXT), "text_output")
        else:
            request = infer_request("tensorrt_llm", self._rng.choice(BAD_TOKENS), "output_ids")
        answer = await self._client.ask(request)
        if answer.code != ERROR or not answer.message or "engine process" in answer.message:
            self.tally.fail(f"a bad request was answered with {answer.code} {answer.message}")
        else:
            self.tally.refused += 1


def _is_served(server: TritonServer, model: str) -> bool:
    try:
        with urllib.request.urlopen(f"{server.http_url}/v2/models/{model}/ready", timeout=5.0) as response:
            return response.status == 200
    except OSError:
        return False


async def _run_all(soak: Soak, memory: MemoryLog, seconds: float, rate: float) -> None:
    watching = asyncio.create_task(memory.run())
    await soak.run(seconds, rate)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


def _pages_at_rest(server: TritonServer, timeout_s: float = 20.0) -> int:
    """Pages in use once nothing is asked any more."""
    deadline = time.monotonic() + timeout_s
    while (used := read_metrics(server.metrics_url)[USED_PAGES]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return int(used)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole soak; returns the report, in which ``wrong`` and ``pages_at_rest`` must be 0."""
    engine = args.engine or tiny_engine(args.work, STUDENT)
    print(f"computing {NUM_CASES} answers offline ...", file=sys.stderr, flush=True)
    cases = make_cases(engine, NUM_CASES, KV_CACHE_GIB, args.seed)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            TritonServer(engine, ServerOptions(kv_cache_gib=KV_CACHE_GIB, log_file=args.log_file))
        )
        gateway = None if args.no_gateway else stack.enter_context(run_gateway(server))

        def pids() -> dict[str, int]:
            own = {} if gateway is None else {GATEWAY: gateway.pid}
            return {**server_processes(server.pid), **own}

        memory = MemoryLog(pids)
        warm_up = min(300.0, args.minutes * 60 / 4)
        print(f"{args.minutes:g} minutes of traffic ...", file=sys.stderr, flush=True)

        async def traffic() -> Tally:
            soak = Soak(server, gateway, cases, args.seed)
            await _run_all(soak, memory, args.minutes * 60, args.rate)
            return soak.tally

        tally = asyncio.run(traffic())
        failure = server.failure()
        if failure:
            failure = f"{failure}; its last words: {server.log_error()}"
        pages = None if failure else _pages_at_rest(server)
    return {
        "requests": dict(tally.asked), "cancelled": tally.cancelled, "refused_as_due": tally.refused,
        "wrong": tally.wrong, "examples": tally.examples, "pages_at_rest": pages, "failure": failure,
        "rss_slope_mib_per_hour": memory.slopes(warm_up), "pss_peak_mib": memory.peak_mib(), "warm_up_s": warm_up,
        "samples": {role: [[round(x, 1) for x in sample] for sample in rows] for role, rows in memory.samples.items()},
    }  # fmt: skip


COLUMNS = (("process", "role", "<24"), ("peak PSS MiB", "peak", ">13.1f"), ("RSS slope, MiB/hour", "slope", ">20"))


def show(report: dict[str, Any]) -> str:
    """The report for a reader."""
    peaks, slopes = report["pss_peak_mib"], report["rss_slope_mib_per_hour"]
    roles = [
        {"role": role, "peak": peaks[role], "slope": "-" if slope is None else f"{slope:+.2f}"}
        for role, slope in slopes.items()
    ]
    asked = ", ".join(f"{count} {path}" for path, count in sorted(report["requests"].items()))
    lines = [
        f"{report['minutes']:g} minutes: {sum(report['requests'].values())} requests ({asked}); "
        f"{report['cancelled']} cancelled, {report['refused_as_due']} refused as due",
        f"wrong: {report['wrong']}; pages in use at rest: {report['pages_at_rest']}",
        *(f"  {example}" for example in report["examples"]),
        text_table(COLUMNS, roles),
    ]
    return "\n".join([*lines, *([f"FAILED: {report['failure']}"] if report["failure"] else [])])


EXPERIMENT = Experiment(
    "perf.serving.soak", __doc__,
    options=(
        option("--minutes", type=positive_float, default=30.0),
        option("--rate", type=positive_float, default=5.0, help="requests a second (default 5)"),
        engine_place("--engine", "default: the demo's tiny SwiftKV student, in float32"), work(), seed(),
        flag("--no-gateway", "leave the OpenAI gateway out"), place("--log-file", "keep the server's log here"),
        output("OUTPUT.json and OUTPUT.svg"),
    ),
    measure=run, settings=("minutes",), shown=show, is_plain=True,
    plot=lambda report, path: plot_memory(report["samples"], path, report["warm_up_s"]),
    failed=lambda report: report["wrong"] or report["pages_at_rest"] or report["failure"],
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
