"""How often a chunk that ShadowKV selects is in place already, on the tiny models' own prompts.

    python -m perf.shadowkv.hit_rate [--work DIR] [--budget 256 512] [--model "no cut"]

``perf.shadowkv.speed`` sets the hit rate; here it is counted, of all KV heads, layers and decode steps, the first of a
prompt (where nothing is in place) included. Prompts are those of ``perf.quality.shadowkv``; each is followed by
``--tokens`` greedy tokens, whatever they are.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.runtime.engine import LLMEngine
from perf.harness.batch import Batch
from perf.harness.command import make_parser, run_main
from perf.harness.options import flag, option, seed, work
from perf.quality.answers import examples_of
from perf.quality.scores import TASKS
from perf.quality.shadowkv import MODELS, Cell, engine_of

RANK, OUTLIERS, CHUNK = 128, 8, 8


def hit_rate(engine_dir: Path, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Return chunks selected, those of them in place, and their ratio."""
    engine = LLMEngine(engine_dir)
    Batch(engine, prompts, num_tokens).finish()
    stats = engine.stats()
    selected, reused = stats["num_selected_chunks"], stats["num_reused_chunks"]
    return {"selected_chunks": selected, "reused_chunks": reused, "hit_rate": reused / max(selected, 1)}


PARSER = make_parser(
    __doc__, work("runs/shadowkv-quality", "engines, kept"),
    option("--budget", type=int, nargs="+", default=[256], metavar="N", help="tokens (default 256)"),
    option("--model", action="append", choices=list(MODELS), help="default: both"),
    option("--num-prompts", type=int, default=3, help="of each of the five tasks (default 3)"),
    option("--length", type=int, default=1500, help="of a prompt (default 1500)"),
    option("--tokens", type=int, default=32, help="generated after each (default 32)"),
    seed(1, "of the prompts (default 1)"), flag("--json", "print one JSON list"),
)  # fmt: skip


def main() -> None:
    """Count and print."""
    args = PARSER.parse_args()
    tokenizer_file = MODELS["no cut"] / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    examples = examples_of(TASKS, tokenizer_file, args.length, args.num_prompts, args.seed)
    prompts = [tokenizer.encode(example.prompt).ids for task in TASKS for example in examples[task]]
    cells = [(model, Cell(budget, RANK)) for model in args.model or MODELS for budget in args.budget]
    rows = []
    for model, cell in tqdm(cells, unit="engine", disable=True if args.json else None):
        engine = engine_of(model, cell, args.length, OUTLIERS, CHUNK, args.work)
        rows.append({"model": model, "budget": cell.budget, **hit_rate(engine, prompts, args.tokens)})
    told = "{model}, budget {budget}: {hit_rate:.1%} of {selected_chunks} chunks in place"
    lines = [f"{len(prompts)} prompts of {args.length} tokens, {args.tokens} tokens after each"]
    print(json.dumps(rows, indent=1) if args.json else "\n".join([*lines, *(told.format_map(row) for row in rows)]))


if __name__ == "__main__":
    raise SystemExit(run_main(main))
