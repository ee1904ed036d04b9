"""Run them all, and print a table.

    python -m tests.support.tensorrt_llm_clients CHECKOUT PYTHON ENGINE [--only TEXT] [--output FILE]

CHECKOUT is a checkout of triton-inference-server/tensorrtllm_backend from before the scripts moved (the parent of
commit 05ceae0). PYTHON has tritonclient[all], transformers, tabulate, pandas and CPU torch. ENGINE is an engine of the
`cpu` target with a context of 1024 tokens or more. Servers take ports 8000 to 8002, which some of the scripts name.
"""

import argparse
import contextlib
import csv
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvforge import LLM, SamplingParams
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.options import ServerOptions
from tests.support.tensorrt_llm_clients.cases import (
    BASE_METRICS,
    CI,
    FULL_MANY,
    FULL_ONE,
    MANY,
    METRICS,
    NUM_TOKENS,
    ONE,
    TEXT_CLIENT,
    Case,
    Known,
    all_cases,
)

PORTS = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
KV_CACHE_GIB = 0.3
TIMEOUT_S = 300
SERVERS = {
    ONE: ServerOptions(decoupled=False, wrap_token_ids=True, kv_cache_gib=KV_CACHE_GIB, **PORTS),
    MANY: ServerOptions(wrap_token_ids=True, kv_cache_gib=KV_CACHE_GIB, **PORTS),
    FULL_ONE: ServerOptions(decoupled=False, max_num_seqs=1, max_queue_size=1, kv_cache_gib=KV_CACHE_GIB, **PORTS),
    FULL_MANY: ServerOptions(max_num_seqs=1, max_queue_size=1, kv_cache_gib=KV_CACHE_GIB, **PORTS),
}
PROMPTS = ("The only thing we have to fear is", "My name is")


def prepare(engine: Path, checkout: Path, work: Path) -> Known:
    """Ask the engine offline what it answers, and write the files that scripts read."""
    llm = LLM(engine, kv_cache_gib=KV_CACHE_GIB)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    outputs = [output.outputs[0] for output in llm.generate(list(PROMPTS), params)]
    tokenizer = llm.tokenizer
    ids = tokenizer.encode(PROMPTS[0])
    for name, row in (
        ("input", ids),
        ("output", [*ids, *outputs[0].token_ids]),
        ("draft", outputs[0].token_ids[:4]),
    ):
        with (work / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerow(row)
    np.save(work / "model.lora_weights.npy", np.zeros((1, 1, 8), np.float16))
    np.save(work / "model.lora_config.npy", np.zeros((1, 1, 3), np.int32))
    np.save(work / "table.npy", np.zeros((1, 4, 8), np.float16))
    texts = (outputs[0].text, outputs[1].text)
    return Known(engine / "tokenizer", checkout / CI / "simple_data.json", work, PROMPTS[0], texts[0], PROMPTS, texts,
                 "localhost:8001", "localhost:8000")  # fmt: skip


def run_script(python: Path, checkout: Path, case: Case, folder: Path) -> tuple[str, float]:
    """Run a case; what is wrong with it, and its seconds."""
    started = time.monotonic()
    command = [str(python), str(checkout / case.script), *case.flags]
    environment = {**os.environ, "PYTHONPATH": "", "BACKEND_ROOT": str(checkout)}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder, env=environment)
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s", time.monotonic() - started
    output = ended.stdout + ended.stderr
    (folder / "last.log").write_text(output)
    return case.problem(ended.returncode, output), time.monotonic() - started


def run_metrics(python: Path, checkout: Path, known: Known, engine: Path) -> Iterator[tuple[Case, str, float]]:
    """The CI's test of metrics against the log, which wants a server's whole log under a certain name."""
    for server, name, flags in ((ONE, "no_streaming", "no_stream"), (MANY, "streaming", "stream")):
        options = {**vars(SERVERS[server]), "log_file": known.work / f"1gpu_IFB_{name}_server.log"}
        with TritonServer(engine, ServerOptions(**{**options, "control_apis": True})):
            level = urllib.request.Request("http://localhost:8000/v2/logging", b'{"log_verbose_level":1}')
            urllib.request.urlopen(level).read()
            asked = ("-u", known.grpc_url, "-p", PROMPTS[1], *(("--streaming",) if server == MANY else ()))
            run_script(python, checkout, Case(TEXT_CLIENT, server, asked), known.work)
            time.sleep(3)  # as the CI does; the last numbers are then on the port and in the log
            metrics = urllib.request.urlopen("http://localhost:8002/metrics").read()
            (known.work / f"1gpu_IFB_{flags}_metrics.out").write_bytes(metrics)
        case = Case(METRICS, server, (f"CustomMetricsTest.test_1_gpu_IFB_{flags}",), "OK")
        yield case, *run_script(python, checkout, case, known.work)


def run_base_metrics(python: Path, checkout: Path, known: Known, engine: Path) -> Iterator[tuple[Case, str, float]]:
    """The CI's test of Triton's own metrics: the first check that fails is the one that is known to."""
    shutil.copy(known.dataset, known.work)
    with TritonServer(engine, SERVERS[ONE]):
        told = "differs: preprocessing and postprocessing count only what clients ask of them"
        case = Case(BASE_METRICS, ONE, ("TRTLLMBaseMetricsTest.test_end_to_end",), "_verify_base_metrics", differs=told)
        yield case, *run_script(python, checkout, case, known.work)
        beams = Case(
            BASE_METRICS, ONE, ("TRTLLMBaseMetricsTest.test_end_to_end_beam_width",), "beam_width", refused=True
        )
        yield beams, *run_script(python, checkout, beams, known.work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--only", default="", help="cases with this in their script and flags")
    parser.add_argument("--output", type=Path, help="also write the table there")
    args = parser.parse_args()
    checkout, engine, python = args.checkout.resolve(), args.engine.resolve(), args.python.absolute()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        known = prepare(engine, checkout, Path(folder))

        def show(case: Case, problem: str, seconds: float) -> None:
            flags = " ".join(json.dumps(flag) if " " in flag else flag for flag in case.flags)
            flags = flags.replace(str(known.work), "FILES").replace(str(known.tokenizer), "TOKENIZER")
            flags = flags.replace(str(known.dataset), "simple_data.json")
            expected = f"refused: {case.shows}" if case.refused else case.differs or "as expected"
            result = problem or expected
            rows.append((case.script, case.server, flags, result, bool(problem)))
            print(f"{case.script} [{case.server}] {flags}: {result} ({seconds:.1f} s)", flush=True)

        chosen = [case for case in all_cases(known) if args.only in f"{case.script} {' '.join(case.flags)}"]
        for name, options in SERVERS.items():
            cases = [case for case in chosen if case.server == name]
            with TritonServer(engine, options) if cases else contextlib.nullcontext():
                for case in cases:
                    show(case, *run_script(python, checkout, case, known.work))
        for script, runs in ((METRICS, run_metrics), (BASE_METRICS, run_base_metrics)):
            for case, problem, seconds in runs(python, checkout, known, engine) if args.only in script else ():
                show(case, problem, seconds)
    wrong = sum(row[-1] for row in rows)
    print(f"{len(rows)} runs, {wrong} wrong")
    if args.output:
        lines = ["| script | server | flags | result |", "|---|---|---|---|"]
        lines += [f"| `{script}` | {server} | `{flags}` | {result} |" for script, server, flags, result, _ in rows]
        args.output.write_text("\n".join(lines).replace("\\|", "|") + f"\n\n{len(rows)} runs, {wrong} wrong.\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
