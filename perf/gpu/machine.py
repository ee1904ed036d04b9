"""What the GPU's benchmarks share: options, the machine's rates, and what a report begins with."""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from perf.gpu.timing import best_seconds
from perf.harness.command import Report, add_work, command_line, make_parser


def gpu_parser(doc: str | None, name: str, lengths: str, work: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that all have; compiled graphs lie in kvforge-NAME where there is ``work``,
    results in $OUT/NAME.json. ``lengths`` are what ``--tiny`` makes short."""
    parser = make_parser(doc)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help=f"a tiny model, short {lengths}")
    if work:
        add_work(parser, Path(tempfile.gettempdir()) / f"kvforge-{name}", "compiled graphs, kept")
    told = f"write the results here (default: $OUT/{name}.json if OUT is set)"
    place = Path(os.environ["OUT"]) / f"{name}.json" if "OUT" in os.environ else None
    parser.add_argument("--json", type=Path, default=place, help=told)
    return parser


def parse_checked(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ends the program where the device cannot run what is asked for."""
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny; what else there is, is for a GPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; try --device cpu --tiny")
    return options


def parse_prepared(
    parser: argparse.ArgumentParser, arguments: list[str] | None, name: str, what: str
) -> argparse.Namespace:
    """As ``parse_checked``, for a program that does ``what`` with ``--prepare FOLDER``, without a GPU, and is given
    that folder by ``--NAME`` on one; a tiny run needs neither."""
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help=what)
    parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help="that --prepare has made")
    if (options := parser.parse_args(arguments)).prepare is not None:
        return options
    options = parse_checked(parser, arguments)
    if getattr(options, name) is None and not options.tiny:
        parser.error(f"--{name} FOLDER is needed; make it with --prepare FOLDER")
    return options


def begin_gpu_report(program: str, arguments: list[str] | None) -> Report:
    """Return the command line of the module ``program``, and the date."""
    return {"command": command_line(program, arguments), "date": time.strftime("%Y-%m-%d")}


def device_name(device: str) -> str:
    """Return the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def machine_rates(device: str) -> dict[str, float]:
    """Return bf16 GEMM FLOP/s and copy bytes/s (read + written), each the best of several."""
    size, num_bytes = (8192, 4 << 30) if device == "cuda" else (512, 64 << 20)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "bf16_gemm_flops_per_s": 2 * size**3 / best_seconds(lambda: torch.mm(a, b), device),
        "copy_bytes_per_s": 2 * num_bytes / best_seconds(lambda: target.copy_(source), device),
    }


def host_copy_rate(device: str) -> float:
    """Return bytes/s of a copy from locked main memory, the best of several; on a CPU, of a copy within memory."""
    source = torch.ones(1 << 30 if device == "cuda" else 1 << 24, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(source, device=device)
    return source.numel() / best_seconds(lambda: target.copy_(source, non_blocking=True), device, runs=5)
