"""First layers of published models, with their real sizes and random weights: planned, built, served.

    python -m perf.engine.published_shapes --folder NEW_DIR [--models SmolLM3-3B ...] [--layers 4] [--output OUTPUT]

Each has a cut at half of its layers with groups of two where there are enough, if its family may be cut.
A prompt of 300 tokens is answered by the engine in process and through `ensemble` of a server: the texts must be equal.
Bytes of the plan stand beside those of the engine, which on target cpu holds a tied head twice: as it is looked up, and
packed. Everything of a model is removed before the next.
"""

import argparse
import json
import shutil
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from kvforge.compiler import BuildOptions, build_engine
from kvforge.manifest import WEIGHTS_FILE, load_manifest
from kvforge.planning.load import load_subject
from kvforge.planning.plan import Fleet, PlannedWorkload, list_variants, make_plan
from kvforge.runtime import LLM, SamplingParams
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from model_defs import load_config
from perf.harness.experiment import Experiment, Row, chosen, number, output, place, ratio
from perf.harness.published_shapes import PUBLISHED, first_layers
from perf.harness.random_checkpoint import write_checkpoint

INPUT_TOKENS, OUTPUT_TOKENS = 300, 8
GIB = 2**30


def planned(checkpoint: Path) -> Row:
    """Return what ``kvforge plan`` says of a checkpoint with its own cut and groups."""
    subject = load_subject(str(checkpoint), None)
    variants = list_variants(
        subject.name, subject.model, subject.cuts, subject.group_sizes, [subject.kv_dtype], all_pairs=False
    )
    work = PlannedWorkload(INPUT_TOKENS, OUTPUT_TOKENS, subject.weight_dtype, 0, subject.page_size, subject.step_tokens)
    plan = make_plan(subject.name, subject.model, variants, work, Fleet((24.0,), 1.0, 1.0, 1.0, 1), 1.0)
    own = (subject.model.cut, subject.model.group_size)
    return next(row for row in plan["variants"] if (row["cut"], row["group_size"]) == own)


def served(engine: Path, prompt: str) -> str:
    """Return the text that a server's `ensemble` answers."""
    with TritonServer(engine, ServerOptions(kv_cache_gib=0.5)) as server:
        asked = {"text_input": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "exclude_input_in_output": True}
        request = urllib.request.Request(
            f"{server.http_url}/v2/models/ensemble/generate",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(json.load(response)["text_output"])


def measure_one(name: str, args: argparse.Namespace) -> Row:
    """Return the row of one model."""
    folder = args.folder.absolute() / name
    config = first_layers(name, args.layers)
    may_have_cut = args.layers > 1 and load_config(config).may_be_cut
    cut, group_size = (args.layers // 2, 2 if args.layers > 3 else 1) if may_have_cut else (None, 1)
    checkpoint = write_checkpoint(folder / "checkpoint", config, cut, group_size)
    plan, engine, start = planned(checkpoint), folder / "engine", time.perf_counter()
    build_engine(checkpoint, engine, BuildOptions(max_seq_len=2048))
    build_s, manifest = time.perf_counter() - start, load_manifest(engine)
    prompt = " ".join(f"t{3 + 7919 * index % (manifest.vocab_size - 3)}" for index in range(INPUT_TOKENS))
    llm = LLM(engine, kv_cache_gib=0.5)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    llm.generate([prompt], params)
    start = time.perf_counter()
    (answer,) = llm.generate([f"t9 {prompt}"], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    first_s = time.perf_counter() - start
    (answer,) = llm.generate([prompt], params)
    text = answer.outputs[0].text
    del llm
    row = {
        "model": name, "layers": args.layers, "of": PUBLISHED[name]["num_hidden_layers"],
        "parameters": manifest.num_parameters, "build_s": build_s, "first_token_s": first_s,
        "planned_weights": plan["weight_bytes"], "weights": (engine / WEIGHTS_FILE).stat().st_size,
        "planned_kv": plan["kv_bytes_per_token"], "kv": manifest.page_bytes / manifest.page_size,
        "served_is_equal": served(engine, prompt) == text,
    }  # fmt: skip
    shutil.rmtree(folder)
    return row


def measure(args: argparse.Namespace) -> list[Row]:
    """Return a row of each model, measured in a process of its own, which gives its memory back."""
    rows = []
    for name in tqdm(args.models, unit="model", disable=None):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rows.append(process.submit(measure_one, name, args).result())
    return rows


EXPERIMENT = Experiment(
    "perf.engine.published_shapes", __doc__,
    options=(
        place("--folder", "for checkpoints and engines; what is made there is removed", required=True),
        chosen("--models", tuple(PUBLISHED)), number("--layers", 4, "of each (default 4)"),
        output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, is_dated=True,
    columns=(
        ("model", "model"), ("layers", lambda row: f"{row['layers']} of {row['of']}"),
        ("parameters, M", lambda row: f"{row['parameters'] / 1e6:.0f}"), ("built, s", "build_s", ".0f"),
        ("weights, GiB", lambda row: f"{row['weights'] / GIB:.2f}"),
        ("share of the plan's", ratio("weights", "planned_weights"), ".3f"),
        ("KV bytes a token", "kv", ".0f"), ("share of the plan's", ratio("kv", "planned_kv"), ".3f"),
        ("first token of 301, s", "first_token_s", ".2f"), ("served text equal", "served_is_equal"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
