"""Answers and distributions of the tiny models with int8 weights against their own with bf16 weights.

    python -m perf.quality.weight [--work DIR] [--num-prompts 200] [--length 1000] [--num-documents 40]

Both committed models, on the same prompts; answers are kept under --work, so an interrupted run continues. Agreement
and perplexity are those of the prompts' own tokens, with bf16 weights as the teacher. Writes OUTPUT.json and .md.
"""

import argparse
import json
import platform
import warnings
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvforge.compiler import BuildOptions, build_engine
from kvforge.engine import MANIFEST_FILE, load_manifest
from kvforge.evaluation.compare import compare_with_teacher, fidelity
from kvforge.evaluation.paired import paired_difference
from kvforge.evaluation.score import MAX_ANSWER_TOKENS, is_correct, wilson
from kvforge.runtime import LLM
from kvforge.tasks.prompt import Example
from perf.quality.answers import answer, examples_of
from perf.quality.kv import ASSETS, TEACHER

MODELS = {"no cut": TEACHER, "cut, 2-way": ASSETS / "tiny-swiftkv"}
WEIGHT_DTYPES = ("bfloat16", "int8")
TASKS = ("needle_single", "variables")


def engine_of(name: str, weight_dtype: str, length: int, work: Path) -> Path:
    """Return the engine of a model, built if it is not there yet."""
    engine = work / "engines" / f"{MODELS[name].name}-{weight_dtype}-{length}"
    if not (engine / MANIFEST_FILE).is_file():
        options = BuildOptions(
            dtype="bfloat16", weight_dtype=weight_dtype, max_num_seqs=32, max_seq_len=length + MAX_ANSWER_TOKENS
        )
        build_engine(MODELS[name], engine, options)
    return engine


def row(name: str, examples: dict[str, list[Example]], args: argparse.Namespace) -> dict[str, Any]:
    """Return what is known of a model: per weight dtype bytes and accuracy, and int8 against bf16."""
    engines = {kind: engine_of(name, kind, args.length, args.work) for kind in WEIGHT_DTYPES}
    texts, right = {}, {}
    for kind, engine in engines.items():
        found = answer(engine, examples, args.length, args.seed, args.work)
        texts[kind] = list(chain.from_iterable(found.values()))
        right[kind] = {
            task: [is_correct(example, text) for example, text in zip(wanted, found[task], strict=True)]
            for task, wanted in examples.items()
        }
    flat = {kind: list(chain.from_iterable(tasks.values())) for kind, tasks in right.items()}
    plain, rounded = (LLM(engines[kind], enable_prefix_cache=False, kv_cache_gib=0.2) for kind in WEIGHT_DTYPES)
    prompts = [example.prompt for example in chain.from_iterable(zip(*examples.values(), strict=True))]
    assert plain.tokenizer is not None
    documents = [plain.tokenizer.encode(prompt) for prompt in prompts[: args.num_documents]]
    return {
        "model": name,
        "weight_bytes": {kind: load_manifest(engine).weight_bytes for kind, engine in engines.items()},
        "accuracy": {
            kind: {
                "value": sum(values) / len(values),
                "interval": wilson(sum(values), len(values)),
                "tasks": {task: sum(answers) / len(answers) for task, answers in right[kind].items()},
            }
            for kind, values in flat.items()
        },
        "difference": asdict(paired_difference(*flat.values())),
        "texts_changed": sum(a != b for a, b in zip(*texts.values(), strict=True)),
        "fidelity": fidelity(compare_with_teacher(rounded, plain, documents)),
    }


def markdown(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return the table with its explanation."""
    head = ["model", *(f"{kind}: exact match ({', '.join(TASKS)})" for kind in WEIGHT_DTYPES), "int8 − bfloat16"]
    head += ["texts changed", "same top token", "KL, nats", "perplexity"]
    lines = [
        "# Quality with int8 weights",
        "",
        f"Tiny models, {len(TASKS) * args.num_prompts} prompts of {args.length} tokens (seed {args.seed}), greedy, "
        "exact match in per cent; paired difference in points with its 95% interval, prompts gained and lost, exact "
        "McNemar p. Top token, KL and perplexity (bfloat16 → int8) on the tokens of "
        f"{args.num_documents} of the prompts.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for entry in rows:
        paired, near = entry["difference"], entry["fidelity"]
        values = [entry["model"]]
        for kind in WEIGHT_DTYPES:
            accuracy = entry["accuracy"][kind]
            tasks = ", ".join(f"{100 * value:.1f}" for value in accuracy["tasks"].values())
            values.append(f"{100 * accuracy['value']:.1f} ({tasks})")
        values += [
            f"{100 * paired['difference']:+.2f} ({100 * paired['low']:+.2f} to {100 * paired['high']:+.2f}), "
            f"+{paired['gained']} −{paired['lost']}, p {paired['p_value']:.2g}",
            str(entry["texts_changed"]),
            f"{100 * near['agreement']['value']:.2f}%",
            f"{near['kl']['value']:.2g}",
            f"{near['teacher_perplexity']['value']:.4g} → {near['perplexity']['value']:.4g}",
        ]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Answer, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/weight-quality"), help="engines and answers")
    parser.add_argument("--num-prompts", type=int, default=200, help="of each task (default 200)")
    parser.add_argument("--length", type=int, default=1000, help="prompt length in tokens (default 1000)")
    parser.add_argument("--num-documents", type=int, default=40, help="prompts whose tokens are scored (default 40)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default 1)")
    parser.add_argument(
        "--output", type=Path, default=Path("perf/results/weight-quality"), help="without suffix (default %(default)s)"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch.export's own
    examples = examples_of(TASKS, TEACHER / "tokenizer.json", args.length, args.num_prompts, args.seed)
    rows = [row(name, examples, args) for name in tqdm(MODELS, unit="model")]
    settings = {name: getattr(args, name) for name in ("num_prompts", "length", "num_documents", "seed")}
    machine = {"machine": platform.machine(), "torch": torch.__version__}
    content = {"command": "python -m perf.quality.weight", **settings, **machine, "rows": rows}
    args.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(markdown(rows, args), encoding="utf-8")
    print(args.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
