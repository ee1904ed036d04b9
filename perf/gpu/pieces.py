"""Graphs in pieces beside whole ones, at the shape of Llama-3.1-8B: what compiling takes, and what a step.

    python -m perf.gpu.pieces --device cpu --layers 32 --json perf/results/pieces-cpu.json
    PYTHONPATH=. python -m perf.gpu.pieces --json perf/results/pieces-h200.json

Each form is compiled in a process of its own, whose core-seconds are counted, those of the compiler it starts included.
Then both run the same steps by turns, in this process. All layers have the same random weights, so that the memory of
one layer does; they are larger than a cache. `--tiny` has small layers.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.pieces import PieceRule
from kvforge.compiler.targets import load_target
from kvforge.runtime.sessions.session import Session
from model_defs import ModelConfig
from perf.gpu import models
from perf.gpu.machine import Kept, device_name, gpu_parser, synchronize
from perf.gpu.models import LLAMA_8B, TINY, VARIANTS, Limits
from perf.gpu.profile import run_step
from perf.harness.command import run_main
from perf.harness.machine import describe_machine
from perf.harness.options import number, option

FORMS = {"whole": PieceRule(0, 1 << 30), "pieces": PieceRule(0, 0)}
LIMITS = Limits(max_num_seqs=64, max_num_tokens=2048, max_seq_len=4096, page_size=64)
STEPS = {"decode, 1 sequence": (1, 512, 1), "decode, 8 sequences": (1, 512, 8), "prompt of 128": (128, 128, 1)}
TINY_STEPS = {"decode, 1 sequence": (1, 40, 1)}


def config_of(options: argparse.Namespace, layers: int) -> tuple[ModelConfig, ResolvedOptions]:
    """Return a model of so many layers without a cut, and its build options."""
    shape = {**(TINY if options.tiny else LLAMA_8B), "num_hidden_layers": layers}
    config = models.model_config(shape, VARIANTS["baseline"])
    return config, models.resolved_options(config, VARIANTS["baseline"], LIMITS, options.device)


@contextmanager
def cutting(target: Any, rule: PieceRule) -> Iterator[None]:
    """Within the block graphs are cut by ``rule``."""
    before, target.PIECES = target.PIECES, rule
    try:
        yield
    finally:
        target.PIECES = before


def compile_form(form: str, options: argparse.Namespace) -> dict[str, float]:
    """Compile in this process; returns the seconds, and the core-seconds of this process and those that it started."""
    config, resolved = config_of(options, options.layers)
    start = time.perf_counter()
    with cutting(load_target(options.device), FORMS[form]):
        models.compile_graphs(config, resolved, options.work / form)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"compile_s": time.perf_counter() - start, "core_s": sum(each.ru_utime + each.ru_stime for each in used)}


def compile_apart(form: str, options: argparse.Namespace) -> dict[str, float]:
    """Compile in a process of its own; returns what ``compile_form`` does there. A tiny run stays in this one."""
    if options.tiny:
        return compile_form(form, options)
    again = [sys.executable, "-m", "perf.gpu.pieces", "--compile-only", form, "--device", options.device]
    again += ["--layers", str(options.layers), "--work", str(options.work)]
    done = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def shared_weights(options: argparse.Namespace) -> dict[str, Tensor]:
    """Return the weights of a model of one layer, and the same tensors under the names of all other layers."""
    drawn = models.random_weights(*config_of(options, 1))
    first = "layers.0."
    own = {name.removeprefix(first): tensor for name, tensor in drawn.items() if name.startswith(first)}
    return drawn | {f"layers.{n}.{name}": tensor for n in range(1, options.layers) for name, tensor in own.items()}


def measure(options: argparse.Namespace, kept: Kept) -> None:
    """Compile both forms and time their steps by turns."""
    compiled = {}
    for form in FORMS:
        compiled[form] = compile_apart(form, options)
        print(f"{form}: {compiled[form]['compile_s']:.1f} s, {compiled[form]['core_s']:.1f} core-seconds", flush=True)
    manifest, weights = models.manifest_of(*config_of(options, options.layers)), shared_weights(options)
    sessions: dict[str, Session] = {form: models.open_session(manifest, weights, options.work / form) for form in FORMS}
    pools = sessions["whole"].allocate_pools(128)
    kept.report |= {"layers": options.layers, "compiled": compiled}
    for name, step in (TINY_STEPS if options.tiny else STEPS).items():
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for turn in range(options.rounds + 2):
            for form, session in sessions.items():
                start = time.perf_counter()
                run_step(session, pools, *step)
                synchronize(options.device)
                if turn >= 2:
                    times[form].append(time.perf_counter() - start)
        ratios = [b / a for a, b in zip(times["whole"], times["pieces"], strict=True)]
        middles = {f"{form}_s": statistics.median(seconds) for form, seconds in times.items()}
        kept.add({"step": name, **middles, "ratio": statistics.median(ratios)})


COLUMNS = (
    ("step", "step", "<22"), ("whole ms", "whole_s", ">10.3f", 1e3), ("pieces ms", "pieces_s", ">10.3f", 1e3),
    ("ratio", "ratio", ">8.4f"),
)  # fmt: skip


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = gpu_parser(
        __doc__, "pieces", "layers", number("--layers", 32),
        number("--rounds", 15, "timed steps of each kind and form (default 15)"),
        option("--compile-only", choices=FORMS, help=argparse.SUPPRESS),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; try --device cpu")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Compile, measure, print a table and write the report."""
    options = parse_arguments(arguments)
    if options.compile_only:
        print(json.dumps(compile_form(options.compile_only, options)))
        return
    kept = Kept("perf.gpu.pieces", arguments, options, COLUMNS)
    kept.report["machine"] = describe_machine() if options.device == "cpu" else device_name(options.device)
    measure(options, kept)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
