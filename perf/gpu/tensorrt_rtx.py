"""Whether TensorRT for RTX runs plans on this GPU: the graph `early_exit` of the tiny student, which has no plugin.

    python -m perf.gpu.tensorrt_rtx --prepare FOLDER                             # no GPU: ONNX, plan, expected logits
    PYTHONPATH=. python -m perf.gpu.tensorrt_rtx --plans FOLDER --json rtx.json  # on a GPU

RTX names Hopper (9.0) neither among what it builds for nor among what it refuses. Three ways are tried: the plan that
was built without a GPU, one built there for RTX's default GPUs, and one built there for the GPU that is there. Being
refused is an answer: the program fails only where nothing could be asked.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvforge.common.errors import KvforgeError
from kvforge.tensorrt import rtx
from perf.gpu.machine import begin_gpu_report, device_name, gpu_parser, parse_prepared
from perf.harness.command import run_main
from perf.harness.engines import STUDENT_DIR, quiet_build
from perf.harness.files import write_json

ONNX, PLAN, EXPECTED = "early_exit.onnx", "early_exit.plan", "expected.safetensors"
WEIGHTS = "weights.safetensors"
TOKENS, SURVIVORS = 24, (3, 7, 23)
RANGES = {"hidden": (1, 16, 64), "survivor_index": (1, 8, 32)}
"""Fewest, likeliest and most of each input's first dimension."""


class Logger:
    """Makes a logger of RTX's class that keeps warnings and errors."""

    def __new__(cls, trt: Any, said: list[str]) -> Any:
        """Return it; what RTX says goes to ``said``."""

        class Keeping(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.ILogger.Severity.WARNING:
                    said.append(message)

        return Keeping()


def build_plan(trt: Any, onnx_file: Path, for_this_gpu: bool = False) -> tuple[bytes | None, list[str]]:
    """Build a plan; returns it, or None, and what the builder said."""
    said: list[str] = []
    builder = trt.Builder(Logger(trt, said))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, Logger(trt, said))
    if not parser.parse_from_file(str(onnx_file)):
        return None, said + [str(parser.get_error(index)) for index in range(parser.num_errors)]
    config = builder.create_builder_config()
    rtx.configure(config, "current" if for_this_gpu else "auto")
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        rest = tuple(tensor.shape)[1:]
        profile.set_shape(tensor.name, *((size, *rest) for size in RANGES[tensor.name]))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    return (None if plan is None else bytes(plan)), said


def prepare(folder: Path) -> None:
    """Write the ONNX file with its weights, RTX's plan, and inputs with the logits that torch computes."""
    from kvforge.compiler import BuildOptions, build_engine

    trt = rtx.load()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvforge-") as temporary, quiet_build():
        engine = Path(temporary) / "engine"
        build_engine(STUDENT_DIR, engine, BuildOptions("tensorrt"))
        for name in (ONNX, WEIGHTS):
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
    plan, said = build_plan(trt, folder / ONNX)
    if plan is None:
        raise KvforgeError(f"RTX built no plan: {(said or ['it did not say why'])[-1]}")
    (folder / PLAN).write_bytes(plan)
    print(f"{len(plan)} bytes of plan in {folder}")


def run_plan(trt: Any, plan: bytes, expected: dict[str, Tensor], device: str) -> dict[str, Any]:
    """Load and run a plan; returns how far it came, what RTX said, and how far the logits are from torch's, relative to
    the largest."""
    said: list[str] = []
    row: dict[str, Any] = {"loads": False, "runs": False, "said": said}
    start = time.perf_counter()
    runtime = trt.Runtime(Logger(trt, said))
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        return row
    row |= {"loads": True, "load_s": time.perf_counter() - start}
    context = engine.create_execution_context()
    if context is None:
        return row
    inputs = {name: expected[name].to(device) for name in RANGES}
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
    trt, expected = rtx.load(), load_file(folder / EXPECTED)
    ways: dict[str, Callable[[], tuple[bytes | None, list[str]]]] = {
        "built without a GPU": lambda: ((folder / PLAN).read_bytes(), []),
        "built here, for RTX's defaults": lambda: build_plan(trt, folder / ONNX),
        "built here, for this GPU": lambda: build_plan(trt, folder / ONNX, for_this_gpu=True),
    }
    rows = []
    for way, build in ways.items():
        start = time.perf_counter()
        plan, said = build()
        row = {"plan": way, "build_s": time.perf_counter() - start, "bytes": len(plan or b"")}
        row |= {"loads": False, "runs": False, "said": said} if plan is None else run_plan(trt, plan, expected, device)
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
    parser = gpu_parser(__doc__, "tensorrt_rtx", "inputs", work=False)
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
    sys.exit(run_main(main))
