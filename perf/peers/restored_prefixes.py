"""Prompts kept in files and taken up by a new process: this project's pages beside what others keep.

    python -m perf.peers.restored_prefixes --engine DIR --folder NEW_DIR [--gguf MODEL.gguf --llama-python PYTHON] \\
        [--checkpoint DIR --vllm-python PYTHON] [--lengths 2000 8000] [--output OUTPUT]

DIR is an engine of the same model. llama.cpp saves and loads a sequence; vLLM 0.32 has its OffloadingConnector on GPUs
alone ("CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"), so that its ExampleConnector is asked,
which writes K and V of whole prompts. Times are to the first token, files in the system's cache. A restored prompt is
all that a restarted server does for it, but for loading weights (vLLM: and making its cache): reading, checking, and
computing what no file has.
"""

import argparse
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.common.errors import KvforgeError
from kvforge.manifest import load_manifest
from kvforge.runtime.sessions.session import load_session
from perf.engine.stored_prefixes import open_engine, serve
from perf.harness.engines import ROOT
from perf.harness.experiment import Experiment, Row, engine_place, numbers, output, place, ratio, seed


def by_llama(python: Path, gguf: Path, prompts: list[list[int]], folder: Path) -> list[dict[str, Any]]:
    """Return llama.cpp's rows; raises KvforgeError where it fails."""
    folder.mkdir(parents=True)
    asked = folder / "prompts.json"
    asked.write_text(json.dumps(prompts), encoding="utf-8")
    command = [str(python), "-m", "perf.peers.llama_prefix_worker", str(gguf.resolve()), str(asked), str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(folder)
    if done.returncode:
        raise KvforgeError(f"{python} did not measure {gguf}; see its last words above.")
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_vllm(python: Path, checkpoint: Path, prompts: list[list[int]], folder: Path) -> list[dict[str, Any]]:
    """Return vLLM's rows, by two processes after each other; raises KvforgeError where one fails."""
    folder.mkdir(parents=True)
    asked, kept = folder / "prompts.json", folder / "kept"
    asked.write_text(json.dumps(prompts), encoding="utf-8")
    worker = [str(python), "-m", "perf.peers.vllm_prefix_worker", str(checkpoint.resolve()), str(asked), str(kept)]
    runs = []
    for _ in range(2):
        done = subprocess.run([*worker, "ExampleConnector"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise KvforgeError(f"{python} did not measure {checkpoint}; see its last words above.")
        runs.append([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
    shutil.rmtree(folder)
    before = [0, *(row["bytes"] for row in runs[0])]
    return [
        {"computed_s": first["seconds"], "restored_s": again["seconds"], "bytes": first["bytes"] - least,
         "is_equal": first["token"] == again["token"]}
        for first, again, least in zip(*runs, before, strict=False)
    ]  # fmt: skip


def by_engine(engine: Path, prompts: list[list[int]], folder: Path) -> list[dict[str, Any]]:
    """Return this project's rows."""
    session, rows = load_session(engine, load_manifest(engine)), []
    serve(open_engine(session, None), [prompts[0][:500]], 2)
    for prompt in prompts:
        computed, _, answer = serve(open_engine(session, folder), [prompt], 1)
        size, start = sum(path.stat().st_size for path in folder.glob("*/*.page")), time.perf_counter()
        _, _, again = serve(open_engine(session, folder), [prompt], 1)
        restored = time.perf_counter() - start
        rows.append({"computed_s": computed, "restored_s": restored, "bytes": size, "is_equal": again == answer})
        shutil.rmtree(folder)
    return rows


def measure(args: argparse.Namespace) -> list[Row]:
    """Measure each, one after the other; returns the rows. Raises KvforgeError where an interpreter is missing."""
    for model, python in (("gguf", "llama_python"), ("checkpoint", "vllm_python")):
        if bool(getattr(args, model)) != bool(getattr(args, python)):
            raise KvforgeError(f"--{model} and --{python.replace('_', '-')} come together; give both or neither.")
    vocab_size, rng = load_manifest(args.engine).vocab_size, np.random.default_rng(args.seed)
    prompts = [rng.integers(3, vocab_size, length).tolist() for length in args.lengths]
    folder = args.folder.absolute()
    by_name = {"kvforge": by_engine(args.engine, prompts, folder)}
    if args.gguf:
        by_name["llama.cpp"] = by_llama(args.llama_python.absolute(), args.gguf, prompts, folder)
    if args.checkpoint:
        by_name["vLLM"] = by_vllm(args.vllm_python.absolute(), args.checkpoint, prompts, folder)
    kept = ("computed_s", "restored_s", "bytes", "is_equal")
    return [
        {"system": name, "tokens": length, **{key: row[key] for key in kept}}
        for name, of_name in by_name.items()
        for length, row in zip(args.lengths, of_name, strict=True)
    ]


EXPERIMENT = Experiment(
    "perf.peers.restored_prefixes", __doc__,
    options=(
        engine_place("--engine", "an engine directory", required=True),
        place("--gguf", "the same model as a file"),
        place("--llama-python", "an interpreter with llama-cpp-python"),
        place("--checkpoint", "the same model in Hugging Face's format"),
        place("--vllm-python", "an interpreter with vLLM"),
        place("--folder", "for pages and states; it is removed", required=True),
        numbers("--lengths", [2000, 8000], "(default 2000 8000)"), seed(), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, is_dated=True,
    columns=(
        ("system", "system"),
        ("tokens", "tokens"),
        ("computed, s", "computed_s", ".2f"),
        ("restored, s", "restored_s", ".3f"),
        ("times faster", ratio("computed_s", "restored_s"), ".0f"),
        ("bytes a token", ratio("bytes", "tokens"), ".0f"),
        ("same token", "is_equal"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
