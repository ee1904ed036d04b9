"""Whether TensorRT for RTX runs plans on this GPU: the graph `early_exit` of the tiny student, which has no plugin.

    python -m perf.gpu.tensorrt_rtx --prepare FOLDER                             # no GPU: ONNX, plan, expected logits
    PYTHONPATH=. python -m perf.gpu.tensorrt_rtx --plans FOLDER --json rtx.json  # on a GPU

RTX names Hopper (9.0) neither among what it builds for nor among what it refuses. Three ways are tried: the plan that
was built without a GPU, one built there for RTX's default GPUs, and one built there for the GPU that is there. Being
refused is an answer: the program fails only where nothing could be asked.
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvforge.common.errors import KvforgeError
from kvforge.common.extras import how_to_install
from kvforge.compiler.options import ResolvedOptions
from kvforge.tensorrt import rtx
from perf.gpu.machine import begin_gpu_report, device_name, gpu_parser, parse_prepared
from perf.harness.command import run_main
from perf.harness.engines import STUDENT_DIR, quiet_build
from perf.harness.files import write_json

ONNX, PLAN, EXPECTED = "early_exit.onnx", "early_exit.plan", "expected.safetensors"
WEIGHTS = "weights.safetensors"
TOKENS, SURVIVORS = 24, (3, 7, 23)
OPTIONS = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 64, 2048, 2048, 32, early_exit=True)
"""Of the plans that are built on the GPU: the product's own, for the tiny student."""


def build(folder: Path, asked: str) -> tuple[bytes | None, list[str]]:
    """Build the plan for these compute capabilities; returns it, or None, and what the builder said."""
    from kvforge.compiler.tensorrt_build import build_plan

    options = dataclasses.replace(OPTIONS, compute_capabilities=asked)
    with tempfile.TemporaryDirectory(prefix="kvforge-") as temporary:
        plan = Path(temporary) / PLAN
        try:
            build_plan("early_exit", folder / ONNX, plan, options)
        except KvforgeError as error:
            return None, [str(error)]
        return plan.read_bytes(), []


def prepare(folder: Path) -> None:
    """Write the ONNX file with its weights, RTX's plan, and inputs with the logits that torch computes."""
    from kvforge.compiler import BuildOptions, build_engine

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvforge-") as temporary, quiet_build():
        engine = Path(temporary) / "engine"
        build_engine(STUDENT_DIR, engine, BuildOptions("tensorrt"))
        for name in (ONNX, PLAN, WEIGHTS):
            if not (engine / "rank0" / name).is_file():
                raise KvforgeError(f"No plan was built; install TensorRT for RTX with {how_to_install(rtx.NAME)}.")
            (folder / name).write_bytes((engine / "rank0" / name).read_bytes())
    weights = load_file(folder / WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    norm, head = weights["norm_early_exit.weight"], weights["lm_head_early_exit.weight"]
    hidden = torch.randn(TOKENS, norm.shape[0], generator=generator).to(norm.dtype)
    survivors = torch.tensor(SURVIVORS, dtype=torch.int32)
    wide = hidden[survivors.long()].float()
    normed = norm.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5))
    logits = normed @ head.float().T
    save_file({"hidden": hidden, "survivor_index": survivors, "logits": logits}, folder / EXPECTED)
    print(f"{(folder / PLAN).stat().st_size} bytes of plan in {folder}")


def run_plan(plan: bytes, expected: dict[str, Tensor], device: str) -> dict[str, Any]:
    """Load and run a plan; returns how far it came, what RTX said, and how far the logits are from torch's, relative to
    the largest."""
    from kvforge.compiler.tensorrt_build import build_logger

    logger = build_logger()
    row = _run(plan, expected, device, logger)
    return {**row, "said": [*logger.warnings, *logger.errors]}


def _run(plan: bytes, expected: dict[str, Tensor], device: str, logger: Any) -> dict[str, Any]:
    from kvforge.tensorrt.api import trt

    row: dict[str, Any] = {"loads": False, "runs": False}
    start = time.perf_counter()
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        return row
    row |= {"loads": True, "load_s": time.perf_counter() - start}
    context = engine.create_execution_context()
    if context is None:
        return row
    inputs = {name: expected[name].to(device) for name in ("hidden", "survivor_index")}
    logits = torch.empty(expected["logits"].shape, device=device)
    for name, tensor in inputs.items():
        context.set_input_shape(name, tuple(tensor.shape))
        context.set_tensor_address(name, tensor.data_ptr())
    context.set_tensor_address("logits", logits.data_ptr())
    stream = torch.cuda.Stream()
    start = time.perf_counter()
    row["runs"] = bool(context.execute_async_v3(stream.cuda_stream))
    stream.synchronize()
    row["first_run_s"] = time.perf_counter() - start
    difference = (logits.cpu() - expected["logits"]).abs().max() / expected["logits"].abs().max()
    row["difference"] = float(difference)
    return row


def answers(folder: Path, device: str) -> list[dict[str, Any]]:
    """Return a row for each of the three ways."""
    expected = load_file(folder / EXPECTED)
    ways: dict[str, Callable[[], tuple[bytes | None, list[str]]]] = {
        "built without a GPU": lambda: ((folder / PLAN).read_bytes(), []),
        "built here, for RTX's defaults": lambda: build(folder, "auto"),
        "built here, for this GPU": lambda: build(folder, "current"),
    }
    rows = []
    for way, make in ways.items():
        start = time.perf_counter()
        plan, said = make()
        row = {"plan": way, "build_s": time.perf_counter() - start, "bytes": len(plan or b"")}
        row |= {"loads": False, "runs": False, "said": said} if plan is None else run_plan(plan, expected, device)
        rows.append(row)
    return rows


def told(row: dict[str, Any]) -> str:
    """Return a row as a line, and what RTX said."""
    outcome = "runs" if row["runs"] else "loads, does not run" if row["loads"] else "does not load"
    if row["runs"]:
        outcome += f", {row['difference']:.1e} from torch's logits"
    return "\n  ".join([f"{row['plan']}: {outcome}", *row["said"]])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = gpu_parser(__doc__, "tensorrt_rtx", "inputs", has_work=False)
    return parse_prepared(parser, arguments, "plans", "write what the other form needs; no GPU")


def main(arguments: list[str] | None = None) -> None:
    """Prepare, or ask; a tiny run does both."""
    options = parse_arguments(arguments)
    if options.prepare is not None:
        prepare(options.prepare)
        return
    with tempfile.TemporaryDirectory(prefix="kvforge-") as temporary:
        folder = options.plans or Path(temporary)
        if options.tiny:
            prepare(folder)
        rows = answers(folder, options.device)
    report = {**begin_gpu_report("perf.gpu.tensorrt_rtx", arguments), "machine": device_name(options.device)}
    print("\n".join(map(told, rows)))
    if options.json:
        write_json(options.json, {**report, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(run_main(main))
