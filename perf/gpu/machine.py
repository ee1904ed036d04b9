"""What the GPU's benchmarks share: options, the machine's rates, and what a report begins with."""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from perf.gpu.timing import best_seconds
from perf.harness.command import Report, command_line, make_parser
from perf.harness.files import write_json
from perf.harness.options import Option, flag, option, place, work
from perf.harness.tables import Row, text_table


def gpu_parser(
    doc: str | None, name: str, lengths: str, *options: Option, has_work: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the options that all have, and these; compiled graphs lie in kvforge-NAME where it
    ``has_work``, results in $OUT/NAME.json. ``lengths`` are what ``--tiny`` makes short."""
    told = f"write the results here (default: $OUT/{name}.json if OUT is set)"
    at = Path(os.environ["OUT"]) / f"{name}.json" if "OUT" in os.environ else None
    kept = [work(Path(tempfile.gettempdir()) / f"kvforge-{name}", "compiled graphs, kept")] if has_work else []
    device = option("--device", choices=("cuda", "cpu"), default="cuda")
    return make_parser(
        doc, device, flag("--tiny", f"a tiny model, short {lengths}"), *kept, place("--json", told, default=at),
        *options,
    )  # fmt: skip


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


class Kept:
    """The rows of a report, which is printed and written to ``options.json`` as it grows. It begins with the command
    line of the module ``program``, the date, the machine, and what ``more`` there is."""

    def __init__(
        self, program: str, arguments: list[str] | None, options: argparse.Namespace, columns: Sequence[tuple] = (),
        gap: str = " ", **more: Any,
    ) -> None:  # fmt: skip
        machine = {"machine": f"{device_name(options.device)}, torch {torch.__version__}"}
        self.report: Report = {**begin_gpu_report(program, arguments), **machine, **more}
        self.rows: list[Row] = []
        self._columns, self._gap, self._json = columns, gap, options.json
        if columns:
            print(self.table([]), flush=True)

    def add(self, *rows: Row) -> None:
        """Print rows below the others, and write the report."""
        self.rows += rows
        print(self.table(rows, header=False), flush=True)
        self.write(rows=self.rows)

    def table(self, rows: Sequence[Row] | None = None, header: bool = True) -> str:
        """Return these rows as text, all by default."""
        return text_table(self._columns, self.rows if rows is None else rows, header, self._gap)

    def write(self, **found: Any) -> None:
        """Write the report with what is found so far."""
        self.report |= found
        if self._json:
            write_json(self._json, self.report)


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
