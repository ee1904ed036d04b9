"""Block sizes of attention's kernels: many compiled without a GPU, timed on one in seconds each.

    python -m perf.gpu.tunings --prepare FOLDER [--jobs 2]                        # no GPU; Triton compiles for 9.0
    PYTHONPATH=. python -m perf.gpu.tunings --kernels FOLDER --json tunings.json  # on a GPU

Preparing writes a cubin of each kernel of each tuning with what ptxas says of it: registers, and bytes spilled. There,
each is loaded by the CUDA driver and started as TensorRT would start it; its results are compared with the default
tuning's. `--device cpu --tiny` prepares a few and runs the same kernels in Triton's interpreter.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from perf.gpu.attention import DTYPES, HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, Case, Tensors
from perf.gpu.machine import Kept, gpu_parser, machine_rates, parse_prepared
from perf.gpu.timing import best_seconds
from perf.harness.command import run_main
from perf.harness.files import read_json, write_json
from perf.harness.options import number
from perf.harness.tables import text_table
from plugins.cuda_driver import DriverRunner, LoadedKernel, spec_key
from plugins.errors import PluginError
from plugins.paged_attention import cuda as kernels
from plugins.paged_attention.cuda import AttentionShape, combine_spec, partial_spec
from plugins.paged_attention.cuda_tuning import Blocks, Tuning
from plugins.triton_cache import PoolLayout
from plugins.triton_kernel import KernelSpec, run_kernel
from plugins.triton_ptx import compile_ptx

CAPABILITY = 90
INDEX = "kernels.json"
CASES = {
    "prefill": tuple(Case(s, n, n, dtype) for dtype in ("bf16", "fp8") for s, n in ((1, 8192), (8, 2048))),
    "decode": tuple(
        Case(s, 1, n, dtype) for dtype in ("bf16", "fp8") for s, n in ((1, 8192), (8, 8192), (64, 8192), (8, 32768))
    ),
}
TINY_CASES = {
    "prefill": (Case(1, 3, 3, "bf16"),),
    "decode": (Case(1, 1, 66, "bf16"),),
}


def shape_of(dtype: str) -> AttentionShape:
    """Return what the kernels know of a case's cache at compile time."""
    cache = PoolLayout(DTYPES[dtype], PAGE_SIZE, KV_HEADS, HEAD_DIM, dynamic=dtype != "bf16")
    return AttentionShape(cache, torch.bfloat16, HEADS, HEAD_DIM**-0.5)


def variants(kind: str, dtype: str) -> Iterator[tuple[str, Tuning]]:
    """Yield names and tunings, the default first."""
    default = shape_of(dtype).tuning(CAPABILITY)
    yield "default", default
    if kind == "prefill":
        blocks = [
            Blocks(rows, keys, warps, stages)
            for rows, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
            for keys in (32, 64, 128)
            for stages in (2, 3, 4)
        ]
        tunings = [replace(default, prefill=each) for each in blocks]
        names = [f"{each.rows}x{each.keys}, {each.num_warps} warps, {each.num_stages} stages" for each in blocks]
    else:
        splits = default.num_splits
        choices = [
            (Blocks(default.decode.rows, keys, warps, stages), num_splits)
            for keys in (32, 64, 128)
            for warps in (2, 4, 8)
            for stages in (2, 3, 5)
            for num_splits in (splits, 2 * splits)
        ]
        tunings = [replace(default, decode=each, num_splits=number) for each, number in choices]
        names = [
            f"{each.keys} keys, {each.num_warps} warps, {each.num_stages} stages, {number} splits"
            for each, number in choices
        ]
    yield from ((name, tuning) for name, tuning in zip(names, tunings, strict=True) if tuning != default)


def chosen_variants(kind: str, dtype: str, tiny: bool) -> list[tuple[str, Tuning]]:
    """Return the variants, two of them for a tiny run."""
    return list(variants(kind, dtype))[: 2 if tiny else None]


def specs_of(dtype: str, tuning: Tuning) -> tuple[KernelSpec, KernelSpec]:
    """Return the two kernels of a tuning."""
    shape = shape_of(dtype)
    return partial_spec(shape, tuning), combine_spec(shape, tuning)


def key_of(spec: KernelSpec) -> str:
    """Return a key of a kernel's machine code, as text."""
    return repr(spec_key(spec))


def compile_one(dtype: str, tuning: Tuning, which: int, file: Path) -> dict[str, Any]:
    """Compile one kernel of a tuning to ``file``; returns what the driver needs, what ptxas says, or ``refused``."""
    spec = specs_of(dtype, tuning)[which]
    try:
        compiled = compile_ptx(spec, CAPABILITY)
    except (PluginError, RuntimeError, AssertionError) as error:  # the latter are Triton's own
        return {"key": key_of(spec), "refused": str(error).splitlines()[0][:160]}
    return {
        "key": key_of(spec), "file": file.name, "entry": compiled.entry, "num_threads": compiled.num_threads,
        "shared_bytes": compiled.shared_bytes, **assemble(compiled.ptx, file),
    }  # fmt: skip


def assemble(ptx: str, file: Path) -> dict[str, int]:
    """Write the cubin of some PTX to ``file`` with Triton's ptxas; returns registers a thread and bytes spilled.

    Raises:
        KvforgeError: ptxas failed.
    """
    import triton

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{CAPABILITY}a", source.name, "-o", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KvforgeError(f"ptxas failed: {(done.stderr.splitlines() or ['no message'])[0]}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    return {"registers": int(registers[1]) if registers else 0, "spilled_bytes": sum(map(int, spilled))}


def prepare(folder: Path, jobs: int, tiny: bool) -> None:
    """Compile all kernels into ``folder``, with a bar."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, tuple[str, Tuning, int]] = {}
    for kind, cases in (TINY_CASES if tiny else CASES).items():
        for dtype in dict.fromkeys(case.dtype for case in cases):
            for _, tuning in chosen_variants(kind, dtype, tiny):
                for which, spec in enumerate(specs_of(dtype, tuning)):
                    wanted.setdefault(key_of(spec), (dtype, tuning, which))
    with (
        ProcessPoolExecutor(jobs, get_context("spawn")) as pool,
        tqdm(total=len(wanted), desc="kernels", unit="kernel", mininterval=1) as bar,
    ):
        futures = [
            pool.submit(compile_one, *what, folder / f"{number}.cubin") for number, what in enumerate(wanted.values())
        ]
        found = []
        for future in futures:
            found.append(future.result())
            bar.update()
    write_json(folder / INDEX, found)
    refused = [entry for entry in found if "refused" in entry]
    print(f"{len(found) - len(refused)} kernels in {folder}, {len(refused)} refused")


class Prepared:
    """The kernels in a folder, loaded when they are first started."""

    def __init__(self, folder: Path) -> None:
        index = read_json(folder / INDEX, None)
        if index is None:
            raise KvforgeError(f"{folder} has no {INDEX}; make it with python -m perf.gpu.tunings --prepare FOLDER.")
        self._folder = folder
        self.told: dict[str, dict[str, Any]] = {entry["key"]: entry for entry in index}

    def load(self, spec: KernelSpec) -> LoadedKernel:
        """Load a kernel."""
        entry = self.told[key_of(spec)]
        image = (self._folder / entry["file"]).read_bytes()
        return LoadedKernel(image, entry["entry"], entry["num_threads"], entry["shared_bytes"])

    def interpret(self, spec: KernelSpec, tensors: Mapping[str, Tensor], wrap: Any = None) -> None:
        """Run a kernel in Triton's interpreter; it must be among the prepared ones."""
        assert (self._folder / self.told[key_of(spec)]["file"]).is_file()
        run_kernel(spec, tensors, wrap)


Start = Callable[..., None]


def rows_of(kind: str, case: Case, prepared: Prepared, start: Start, device: str, tiny: bool) -> list[dict[str, Any]]:
    """Return a row for each variant of a case: seconds, and the largest difference from the default's results."""
    tensors, rows = Tensors.of(case, device), []
    expected: Tensor | None = None
    kernels.run_kernel = start  # what ``launch`` starts its kernels with
    for name, tuning in chosen_variants(kind, case.dtype, tiny):
        told = [prepared.told.get(key_of(spec), {"refused": "not prepared"}) for spec in specs_of(case.dtype, tuning)]
        row: dict[str, Any] = {"case": case.name, "variant": name, "tuning": asdict(tuning)}
        rows.append(row)
        if refused := [entry["refused"] for entry in told if "refused" in entry]:
            row["refused"] = refused[0]
            continue
        row["registers"] = [entry["registers"] for entry in told]
        row["spilled"] = [entry["spilled_bytes"] for entry in told]

        def work(tuning: Tuning = tuning) -> Tensor:
            return kernels.launch(*tensors.arguments, tuning=tuning)

        started = perf_counter()
        result = work().float()
        expected = result if expected is None else expected
        row["difference"] = float((result - expected).abs().max() / expected.abs().max())
        row["seconds"] = perf_counter() - started if tiny else best_seconds(work, device, runs=10)
    return rows


COLUMNS = (
    ("case", "case", "<22"), ("variant", "variant", "<42"), ("ms", "seconds", ">9.4f", 1e3),
    ("of default", "of_default", ">10.2f"), ("share", "share_of_floor", ">6.2f"),
    *((name, lambda row, name=name: "/".join(map(str, row.get(name, []))), f">{width}")
      for name, width in (("registers", 10), ("spilled", 9))),
)  # fmt: skip


def judged(rows: list[dict[str, Any]], case: Case, rates: dict[str, float]) -> list[dict[str, Any]]:
    """Return a case's rows, the fastest first, with time over the default's and the share of the floor."""
    floor = max(case.flops / rates["bf16_gemm_flops_per_s"], case.num_bytes / rates["copy_bytes_per_s"])
    default = rows[0].get("seconds")
    for row in rows:
        if "seconds" in row:
            row |= {
                "of_default": row["seconds"] / default if default else None,
                "share_of_floor": floor / row["seconds"],
            }
    return sorted(rows, key=lambda row: row.get("seconds", float("inf")))


def measure(options: argparse.Namespace, folder: Path, arguments: list[str] | None) -> None:
    """Time all cases; the report is written after each."""
    device, prepared = options.device, Prepared(folder)
    start: Start = prepared.interpret if device == "cpu" else DriverRunner(CAPABILITY, prepared.load)
    rates = machine_rates(device)
    kept = Kept("perf.gpu.tunings", arguments, options, rates=rates)
    for kind, cases in (TINY_CASES if options.tiny else CASES).items():
        for case in cases:
            found = judged(rows_of(kind, case, prepared, start, device, options.tiny), case, rates)
            print(text_table(COLUMNS, found[:6]), flush=True)
            kept.write(rows=[*kept.report.get("rows", []), *found])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    jobs = number("--jobs", len(os.sched_getaffinity(0)), "compilations at a time")
    parser = gpu_parser(__doc__, "tunings", "cases", jobs, has_work=False)
    return parse_prepared(parser, arguments, "kernels", "compile the kernels into a folder; no GPU")


def main(arguments: list[str] | None = None) -> int:
    """Prepare or measure. A tiny run does both, the one where Triton compiles, the other where it interprets."""
    options = parse_arguments(arguments)
    torch.manual_seed(0)
    if options.prepare is not None:
        prepare(options.prepare, options.jobs, options.tiny)
    elif options.tiny:
        if os.environ.get("TRITON_INTERPRET") != "1":
            again = [sys.executable, "-m", "perf.gpu.tunings", *(sys.argv[1:] if arguments is None else arguments)]
            return subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
        with tempfile.TemporaryDirectory(prefix="kvforge-") as folder:
            environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
            command = [sys.executable, "-m", "perf.gpu.tunings", "--tiny", "--jobs", "1", "--prepare", folder]
            subprocess.run(command, env=environment, check=True)
            measure(options, Path(folder), arguments)
    else:
        measure(options, options.kernels, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
