"""Prompt lookup against plain decoding on the tiny models, both on one engine, in turn.

    python -m perf.speculation_prompt_lookup [--work DIR] [--num-pairs 9] [--num-speculative-tokens 8]

Tasks: "lists" copies (list_recall of kvforge/tasks: answers stand in the prompt; only right ones are timed),
"continued" is what the model greedily writes after an answer, which repeats itself, "prose" is drawn at temperature 1,
where lookups often find something and are mostly wrong, "no repetition" at a temperature at which nearly all tokens are
equally likely. Speed is that of decoding: tokens after the first step that gave one, over the time since. A pair is the
faster of two runs of each on the same prompts, in the order plain, drafts, drafts, plain; the ratio is the median of
the pairs'. Writes OUTPUT.json and .md.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions, build_engine
from kvforge.engine import MANIFEST_FILE, TOKENIZER_DIR, load_manifest
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.session import Session, load_session
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.tokenizer import Tokenizer
from kvforge.tasks.prompt import Example, make_examples

ASSETS = Path("model_defs/assets")
MODELS = ("tiny-teacher", "tiny-swiftkv")
BATCHES = (1, 4, 8)
MAX_DRAFT_LEN = 16
LENGTH = 300
"""Tokens of a prompt."""
NUM_PROMPTS = 16


@dataclass(frozen=True)
class Task:
    """How the examples are continued; ``num_tokens`` None: to the end of the answer."""

    num_tokens: int | None
    temperature: float

    def params(self, example: Example, tokenizer: Tokenizer, seed: int) -> SamplingParams:
        num_tokens = self.num_tokens
        if num_tokens is None:
            num_tokens = len(tokenizer.encode(f" {example.answer}", add_special_tokens=False))
        return SamplingParams(temperature=self.temperature, max_tokens=num_tokens, ignore_eos=True, seed=seed)


TASKS = {
    "lists": Task(None, 0.0),
    "continued": Task(192, 0.0),
    "prose": Task(96, 1.0),
    "no repetition": Task(96, 20.0),
}


@dataclass(frozen=True)
class Run:
    """What one run over some prompts took: seconds of steps after the first one, and the tokens of each prompt."""

    seconds: float
    tokens: list[list[int]]
    num_first: int

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return (sum(map(len, self.tokens)) - self.num_first) / self.seconds


def engine_of(name: str, work: Path) -> Path:
    """Return the engine of a model, built if it is not there yet."""
    engine = work / name
    if not (engine / MANIFEST_FILE).is_file():
        build_engine(ASSETS / name, engine, BuildOptions(max_num_seqs=max(BATCHES), max_draft_len=MAX_DRAFT_LEN))
    return engine


def decode(engine: LLMEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Run:
    """Serve prompts together; their prompts are computed in one step."""
    for i, pair in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), *pair)
    tokens: list[list[int]] = [[] for _ in prompts]

    def step() -> None:
        for output in engine.step():
            tokens[int(output.request_id)] += output.new_token_ids

    while not all(tokens):
        step()
    num_first, start = sum(map(len, tokens)), time.perf_counter()
    while engine.has_unfinished():
        step()
    return Run(time.perf_counter() - start, tokens, num_first)


def solved(engine: LLMEngine, examples: list[Example], tokenizer: Tokenizer) -> list[Example]:
    """The examples that the model answers right, so that what it writes is copied."""
    right = []
    for example in examples:
        run = decode(engine, [tokenizer.encode(example.prompt)], [TASKS["lists"].params(example, tokenizer, 0)])
        if tokenizer.decode(run.tokens[0]).strip() == example.answer:
            right.append(example)
    return right


def measure(engine: LLMEngine, tokenizer: Tokenizer, name: str, batch: int, args: Any) -> dict[str, Any]:
    """Return speeds of a task with and without drafts, their ratio, and what became of the drafts."""
    drafting = engine.drafting
    kinds = {"ngram": drafting, "plain": None}
    examples = make_examples("list_recall", LENGTH, lambda text: len(tokenizer.encode(text)), NUM_PROMPTS, args.seed)
    if name == "lists":
        examples = solved(engine, examples, tokenizer)
    prompts = [tokenizer.encode(example.prompt) for example in examples]
    params = [TASKS[name].params(example, tokenizer, seed) for seed, example in enumerate(examples)]
    rounds = 4 if name == "lists" else 1
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    before = engine.stats()
    for pair in range(-1, args.num_pairs):  # one to warm up
        picked = [[(pair + 1 + r) * batch + i for i in range(batch)] for r in range(rounds)]
        runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
        for rows in ([row % len(prompts) for row in wanted] for wanted in picked):
            best: dict[str, Run] = {}
            for kind in ("plain", "ngram", "ngram", "plain"):
                engine.drafting = kinds[kind]
                run = decode(engine, [prompts[r] for r in rows], [params[r] for r in rows])
                if kind not in best or run.seconds < best[kind].seconds:
                    best[kind] = run
            for kind, run in best.items():
                runs[kind].append(run)
        if TASKS[name].temperature == 0 and [r.tokens for r in runs["plain"]] != [r.tokens for r in runs["ngram"]]:
            args.num_differing += 1  # bfloat16: a row's rounding may depend on the number of rows
        if pair >= 0:
            for kind, several in runs.items():
                num_tokens = sum(sum(map(len, run.tokens)) - run.num_first for run in several)
                speeds[kind].append(num_tokens / sum(run.seconds for run in several))
    engine.drafting, after = drafting, engine.stats()
    drafted, accepted, drafts = (
        after[key] - before[key] for key in ("num_draft_tokens", "num_accepted_draft_tokens", "num_drafts")
    )
    ratios = [b / a for a, b in zip(speeds["plain"], speeds["ngram"], strict=True)]
    return {
        "task": name,
        "batch": batch,
        "prompts": len(prompts),
        "plain_tok_s": statistics.median(speeds["plain"]),
        "ngram_tok_s": statistics.median(speeds["ngram"]),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "acceptance": accepted / max(drafted, 1),
        "mean_accepted_length": accepted / max(drafts, 1),
        "draft_tokens": drafted,
    }


def table(models: dict[str, list[dict[str, Any]]]) -> str:
    """The results as Markdown."""
    lines = [
        "| model | task | batch | plain tok/s | prompt lookup tok/s | ratio | least to largest | acceptance | "
        "accepted a draft |",
        "|---|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    for model, rows in models.items():
        for row in rows:
            lines.append(
                f"| {model} | {row['task']} | {row['batch']} | {row['plain_tok_s']:.0f} | {row['ngram_tok_s']:.0f} | "
                f"{row['ratio']:.2f} | {min(row['ratios']):.2f} to {max(row['ratios']):.2f} | "
                f"{row['acceptance']:.0%} | {row['mean_accepted_length']:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/speculation"), help="where engines are built")
    parser.add_argument("--output", type=Path, default=Path("perf/results/speculation-prompt-lookup"))
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; others stay in OUTPUT.json")
    parser.add_argument("--task", action="append", choices=tuple(TASKS), help="only this one")
    parser.add_argument("--num-pairs", type=int, default=9)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = args.output.with_suffix(".json")
    models = json.loads(path.read_text())["models"] if args.model and path.is_file() else {}
    args.num_differing = 0
    for model in args.model or MODELS:
        directory = engine_of(model, args.work)
        tokenizer = Tokenizer.from_dir(directory / TOKENIZER_DIR)
        session: Session = load_session(directory, load_manifest(directory))
        config = SpeculativeConfig("ngram", args.num_speculative_tokens)
        engine = LLMEngine(
            session=session, tokenizer=tokenizer, kv_cache_gib=0.1, enable_prefix_cache=False, speculative=config
        )
        cases = [(task, batch) for task in args.task or TASKS for batch in BATCHES]
        models[model] = [measure(engine, tokenizer, *case, args) for case in tqdm(cases, desc=model, disable=None)]
    text = table(models)
    result = {
        "machine": platform.processor() or platform.machine(),
        "num_speculative_tokens": args.num_speculative_tokens,
        "num_pairs": args.num_pairs,
        "pairs_of_greedy_runs_with_other_tokens": args.num_differing,
        "models": models,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(
        "# Prompt lookup against plain decoding\n\n`python -m perf.speculation_prompt_lookup` on two cores, bfloat16, "
        f"at most {args.num_speculative_tokens} drafts a sequence and step, prompts of {LENGTH} tokens. Speed is that "
        f"of decoding; ratios are medians of {args.num_pairs} pairs, each the faster of two runs in turn.\n\n{text}\n"
    )
    print(text)


if __name__ == "__main__":
    main()
