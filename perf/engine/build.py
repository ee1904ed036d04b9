"""Build and load the 213M-parameter engines with empty caches and print the seconds of every stage.

    python -m perf.engine.build [--cut 8] [--json] [--output OUTPUT]

A build and a load are each a process of their own, as a first build on a machine is: compiled operators, Inductor's
cache and precompiled headers lie in a folder that is new. Seconds count from after the imports.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf.harness.experiment import Experiment, option, output
from perf.harness.files import read_json, write_json
from perf.harness.random_checkpoint import LLAMA_213M, write_checkpoint


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
    from kvforge.runtime.engine import LLMEngine
    from kvforge.runtime.sessions import cpu as cpu_session

    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

        return call

    parts = {runtime_engine: ("load_manifest",), cpu_session: ("load_weights", "load_graph", "allocate_pools")}
    for module, names in parts.items():
        for name in names:
            setattr(module, name, timed(name, getattr(module, name)))
    timed("total", LLMEngine)(engine, kv_cache_gib=1.0)
    return seconds


def in_process(code: str, folder: Path) -> dict[str, float]:
    """Return what a function of this module prints as JSON in a new process whose caches are in ``folder``."""
    caches = {
        "KVFORGE_CACHE": str(folder / "operators"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(folder),
        "PYTHONWARNINGS": "ignore",
    }
    script = f"import json; from pathlib import Path; from perf.engine.build import *; print(json.dumps({code}))"
    result = subprocess.run([sys.executable, "-c", script], env=os.environ | caches, stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def measure(cut: int | None, group_size: int) -> dict[str, Any]:
    """Return the seconds of a cold build, a second build (other graphs' caches are warm) and a load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "checkpoint", LLAMA_213M, cut, group_size)
        return {
            "cut": cut,
            "group_size": group_size,
            "cold_build_s": in_process(f"build_stages(Path({str(checkpoint)!r}), Path({name!r}) / 'cold')", folder),
            "warm_build_s": in_process(f"build_stages(Path({str(checkpoint)!r}), Path({name!r}) / 'warm')", folder),
            "load_s": in_process(f"load_stages(Path({name!r}) / 'warm')", folder),
        }


def table(report: dict[str, Any]) -> str:
    """The seconds of every stage."""
    lines = []
    for what in ("cold_build_s", "warm_build_s", "load_s"):
        lines += [what, *(f"  {stage:<16} {seconds:7.2f}" for stage, seconds in report[what].items())]
    return "\n".join(lines)


def add(stem: Path, report: dict[str, Any]) -> None:
    """Add a report to the ones that are there."""
    file = stem.with_suffix(".json")
    write_json(file, [*read_json(file, []), report])


EXPERIMENT = Experiment(
    "perf.engine.build", __doc__,
    options=(
        option("--cut", type=int, help="layers below the cut (default: no cut)"),
        option("--group-size", type=int, default=1, help="layers that share a cache above it (default 1)"),
        output("OUTPUT.json, or add to the reports that are there"),
    ),
    measure=lambda args: measure(args.cut, args.group_size), shown=table, is_dated=True, keep=add,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
