"""Build and load an engine with empty caches and print the seconds of every stage: the 213M model or a checkpoint's.

    python -m perf.engine.build [--checkpoint CHECKPOINT] [--cut 8] [--json] [--output OUTPUT]

Builds and a load are each a process of their own. At the first, compiled operators, Inductor's cache and precompiled
headers lie in a folder that is new; at the second the operators and headers are there, as on a machine that has built
another model, and at the third the graphs as well. Seconds of stages count from after the imports, ``process`` and
``core_s``, those of all cores together, from the start.
"""

import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from kvforge.common.errors import KvforgeError
from perf.harness.experiment import Experiment, option, output
from perf.harness.files import read_json, write_json
from perf.harness.random_checkpoint import LLAMA_213M, write_checkpoint

CACHES = ("nothing", "operators", "graphs")
"""What the caches have at each of the builds, and what they had before."""


def build_stages(checkpoint: Path, engine: Path) -> dict[str, float]:
    """Build and return the seconds of each stage and their sum, ``total``."""
    from kvforge.compiler import build_engine

    begun: list[tuple[str, float]] = []
    build_engine(checkpoint, engine, progress=lambda stage: begun.append((stage, time.perf_counter())))
    begun.append(("end", time.perf_counter()))
    stages = {name: after - start for (name, start), (_, after) in itertools.pairwise(begun)}
    return stages | {"total": sum(stages.values())}


def load_stages(engine: Path) -> dict[str, float]:
    """Load an engine with 1 GiB of K,V cache; return the seconds of the parts of it, and ``total`` with the rest."""
    from kvforge.runtime import engine as runtime_engine
    from kvforge.runtime.sessions import cpu, session

    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

        return call

    parts = (
        (runtime_engine, "load_manifest"), (cpu, "load_weights"), (cpu, "load_graph"), (session, "allocate_pools")
    )  # fmt: skip
    with contextlib.ExitStack() as patched:
        for module, name in parts:
            patched.enter_context(mock.patch.object(module, name, timed(name, getattr(module, name))))
        timed("total", runtime_engine.LLMEngine)(engine, kv_cache_gib=1.0)
    return seconds


def in_process(code: str, folder: Path) -> dict[str, float]:
    """Return what a function of this module prints as JSON in a new process whose caches are in ``folder``, and the
    seconds of the process and of all cores.
    """
    caches = {
        "KVFORGE_CACHE": str(folder / "operators"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(folder),
        "PYTHONWARNINGS": "ignore",
    }
    script = f"import json; from pathlib import Path; from perf.engine.build import *; print(json.dumps({code}))"
    start, used = time.perf_counter(), _core_seconds()
    result = subprocess.run([sys.executable, "-c", script], env=os.environ | caches, stdout=subprocess.PIPE)
    if result.returncode:
        raise KvforgeError("the build or the load failed; see its last words above.")
    whole = {"process": time.perf_counter() - start, "core_s": _core_seconds() - used}
    return json.loads(result.stdout.splitlines()[-1]) | whole


def _core_seconds() -> float:
    """Those of processes that have ended, with their own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _forget_graphs(folder: Path) -> None:
    """Leave operators and precompiled headers, which do not depend on a model."""
    shutil.rmtree(folder / "operators" / "packages")
    for each in (folder / "inductor").iterdir():
        if each.is_dir() and each.name != "precompiled_headers":
            shutil.rmtree(each)


def measure(checkpoint: Path | None, cut: int | None, group_size: int) -> dict[str, Any]:
    """Return the seconds of three builds, with more in the caches each time, and of a load."""
    with tempfile.TemporaryDirectory() as name:
        folder, engine = Path(name), Path(name) / "engine"
        model = checkpoint or write_checkpoint(folder / "checkpoint", LLAMA_213M, cut, group_size)
        found: dict[str, Any] = {
            "checkpoint": checkpoint.name if checkpoint else "213M",
            "cut": cut,
            "group_size": group_size,
        }
        for caches in CACHES:
            if caches == "operators":
                _forget_graphs(folder)
            found[f"with_{caches}_s"] = in_process(f"build_stages(Path({str(model)!r}), Path({str(engine)!r}))", folder)
            if caches != "graphs":
                shutil.rmtree(engine)
        return found | {"load_s": in_process(f"load_stages(Path({str(engine)!r}))", folder)}


def table(report: dict[str, Any]) -> str:
    """The seconds of every stage."""
    lines = [report["checkpoint"]]
    for what in (*(f"with_{caches}_s" for caches in CACHES), "load_s"):
        lines += [what, *(f"  {stage:<16} {seconds:7.2f}" for stage, seconds in report[what].items())]
    return "\n".join(lines)


def add(stem: Path, report: dict[str, Any]) -> None:
    """Add a report to the ones that are there."""
    file = stem.with_suffix(".json")
    write_json(file, [*read_json(file, []), report])


EXPERIMENT = Experiment(
    "perf.engine.build", __doc__,
    options=(
        option("--checkpoint", type=Path, help="a directory or a GGUF file (default: the 213M shape, random weights)"),
        option("--cut", type=int, help="of the 213M shape: layers below the cut (default: no cut)"),
        option("--group-size", type=int, default=1, help="layers that share a cache above it (default 1)"),
        output("OUTPUT.json, or add to the reports that are there"),
    ),
    measure=lambda args: measure(args.checkpoint, args.cut, args.group_size), shown=table, is_dated=True, keep=add,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
