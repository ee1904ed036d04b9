"""Prompt lookup against plain decoding on the tiny models, both at the same time, by turns.

    python -m perf.speculation.prompt_lookup [--work DIR] [--model NAME] [--task NAME] [--batch N] [--seconds 9]

Tasks: "lists" copies (list_recall of kvforge/tasks: answers stand in the prompt; only right ones are timed),
"continued" is what the model greedily writes after an answer, which repeats itself, "prose" is drawn at temperature 1,
where lookups often find something and are mostly wrong, "no repetition" at a temperature at which nearly all tokens are
equally likely.

A pair is two engines on one session that serve the same prompts, one without drafts. Prompts are computed first; then
both decode by turns of ``TURN`` tokens a sequence, in the order plain, drafts, drafts, plain, so that what slows the
machine slows both. Speed is tokens over the time of an engine's own turns; CPU time is that of all threads. The ratio
is the median of the pairs', its interval a bootstrap's (95%, resampling pairs). Cases are measured for ``--seconds``
each and replace the same ones in OUTPUT.json; OUTPUT.md is its table.
"""

import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.sessions.session import Session, load_session
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tasks.prompt import Example, make_examples
from perf.harness.batch import Batch
from perf.harness.command import make_parser, run_main
from perf.harness.engines import ASSETS, cached_engine
from perf.harness.files import merge_rows, read_json, write_report
from perf.harness.options import option, output, seed, work
from perf.harness.rounds import median_interval
from perf.harness.tables import columns_table

MODELS = ("tiny-teacher", "tiny-swiftkv")
BATCHES = (1, 4, 8)
MAX_DRAFT_LEN = 16
LENGTH = 300
"""Tokens of a prompt."""
NUM_PROMPTS = 16
TURN = 8
MIN_PAIRS = 5


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


def engine_of(name: str, work: Path) -> Path:
    """Return the engine of a model, built if it is not there yet."""
    return cached_engine(
        work / name, ASSETS / name, BuildOptions(max_num_seqs=max(BATCHES), max_draft_len=MAX_DRAFT_LEN)
    )


Pair = tuple[LLMEngine, LLMEngine]
"""On one session: without drafts, with drafts."""


def pair_of(
    session: Session,
    tokenizer: Tokenizer,
    drafts: SpeculativeConfig | None,
    kv_cache_gib: float,
    threshold: float | None = None,
) -> Pair:
    """Return two engines without a prefix cache; tokens of the second one may exit early above ``threshold``."""
    plain, drafting = (
        LLMEngine(
            session=session,
            tokenizer=tokenizer,
            kv_cache_gib=kv_cache_gib,
            enable_prefix_cache=False,
            speculative=config,
            early_exit_threshold=above,
        )
        for config, above in ((None, None), (drafts, threshold))
    )
    return plain, drafting


class Run(Batch):
    """Prompts that an engine serves together, and the time that decoding has taken so far. The first tokens, which the
    prompts give, do not count."""

    def __init__(
        self, engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> None:
        super().__init__(engine, prompts, params)
        self.start()
        self.num_tokens, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        self.full_speed = 0.0
        """Tokens a second up to the last turn after which all of the prompts were still decoded."""

    @property
    def speed(self) -> float:
        """Tokens a second, to the end."""
        return self.num_tokens / self.seconds

    def decode(self, num_tokens: int) -> None:
        """Go on until there are this many tokens in all, or no more."""
        cpu, begin = time.process_time(), time.perf_counter()
        while self.num_tokens < num_tokens and self.engine.has_unfinished():
            self.num_tokens += self.step()
        self.seconds += time.perf_counter() - begin
        self.cpu_seconds += time.process_time() - cpu
        if not self.num_finished or not self.full_speed:
            self.full_speed = self.speed


def run_pair(engines: Pair, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Run]:
    """Serve prompts on both engines, turn by turn."""
    runs = [Run(engine, prompts, params) for engine in engines]
    wanted = 0
    while any(run.engine.has_unfinished() for run in runs):
        wanted += TURN * len(prompts)
        for run in runs:
            run.decode(wanted)
        runs.reverse()
    return runs if runs[0].engine is engines[0] else runs[::-1]


def solved(engine: LLMEngine, examples: list[Example], tokenizer: Tokenizer) -> list[Example]:
    """The examples that the model answers right, so that what it writes is copied."""
    right = []
    for example in examples:
        run = Run(engine, [tokenizer.encode(example.prompt)], TASKS["lists"].params(example, tokenizer, 0))
        run.decode(LENGTH)
        if tokenizer.decode(run.tokens[0]).strip() == example.answer:
            right.append(example)
    return right


def interval(ratios: list[float]) -> list[float]:
    """Bounds of the 95% bootstrap interval of the median."""
    found = median_interval(ratios)
    return [found["low"], found["high"]]


def measure(engines: Pair, tokenizer: Tokenizer, name: str, batch: int, args: Any) -> dict[str, Any]:
    """Return speeds of a task with and without drafts, their ratios, and what became of the drafts."""
    examples = make_examples("list_recall", LENGTH, lambda text: len(tokenizer.encode(text)), NUM_PROMPTS, args.seed)
    if name == "lists":
        examples = solved(engines[0], examples, tokenizer)
    prompts = [tokenizer.encode(example.prompt) for example in examples]
    params = [TASKS[name].params(example, tokenizer, seed) for seed, example in enumerate(examples)]
    return {"task": name, **paired(engines, prompts, params, batch, args.seconds)}


def paired(
    engines: Pair, prompts: Sequence[list[int]], params: Sequence[SamplingParams], batch: int, seconds: float
) -> dict[str, Any]:
    """Return speeds of both engines on ``batch`` prompts at a time, ratios of pairs, and what became of the drafts."""
    pairs: list[list[Run]] = []
    num_differing, next_row = 0, 0
    before, end = engines[1].stats(), time.perf_counter() + seconds
    while len(pairs) <= MIN_PAIRS or time.perf_counter() < end:
        rows = [(next_row + i) % len(prompts) for i in range(batch)]
        next_row += batch
        runs = run_pair(engines, [prompts[row] for row in rows], [params[row] for row in rows])
        # bfloat16: a row's rounding may depend on the number of rows
        num_differing += runs[0].tokens != runs[1].tokens
        pairs.append(runs)
    num_tokens = sum(drafting.num_tokens for _, drafting in pairs)
    del pairs[0]  # it warmed up
    after = engines[1].stats()
    drafted, accepted, drafts, exits = (
        after[key] - before[key]
        for key in ("num_draft_tokens", "num_accepted_draft_tokens", "num_drafts", "num_early_exits")
    )
    cpu = [[1e3 * run.cpu_seconds / run.num_tokens for run in pair] for pair in pairs]
    ratios = [drafting.speed / plain.speed for plain, drafting in pairs]
    full_ratios = [drafting.full_speed / plain.full_speed for plain, drafting in pairs]
    return {
        "batch": batch, "prompts": len(prompts), "pairs": len(pairs), "pairs_with_other_tokens": num_differing,
        "plain_tok_s": statistics.median(plain.speed for plain, _ in pairs),
        "drafts_tok_s": statistics.median(drafting.speed for _, drafting in pairs), "ratio": statistics.median(ratios),
        "interval": interval(ratios), "full_batch_ratio": statistics.median(full_ratios),
        "full_batch_interval": interval(full_ratios), "ratios": [round(ratio, 3) for ratio in ratios],
        "plain_cpu_ms_per_token": statistics.median(plain for plain, _ in cpu),
        "drafts_cpu_ms_per_token": statistics.median(drafting for _, drafting in cpu),
        "cpu_ratio": statistics.median(drafting / plain for plain, drafting in cpu),
        "acceptance": accepted / max(drafted, 1), "mean_accepted_length": accepted / max(drafts, 1),
        "draft_tokens": drafted, "share_of_exits": exits / num_tokens,
    }  # fmt: skip


def table(models: dict[str, list[dict[str, Any]]]) -> str:
    """The results as Markdown."""
    columns = (
        ("model", "model"), ("task", "task"), ("batch", "batch"), ("plain tok/s", "plain_tok_s", ".0f"),
        ("prompt lookup tok/s", "drafts_tok_s", ".0f"), ("ratio", "ratio", ".2f"),
        ("95% interval", lambda row: "{:.2f} to {:.2f}".format(*row["interval"])),
        ("all running", "full_batch_ratio", ".2f"), ("pairs", "pairs"),
        ("CPU ms a token, plain", "plain_cpu_ms_per_token", ".2f"), ("with lookup", "drafts_cpu_ms_per_token", ".2f"),
        ("acceptance", lambda row: f"{row['acceptance']:.0%}" if row["draft_tokens"] else "-"),
        ("accepted a draft", lambda row: f"{row['mean_accepted_length']:.1f}" if row["draft_tokens"] else "-"),
    )  # fmt: skip
    rows = [{"model": model, **row} for model, own in models.items() for row in own]
    return columns_table(columns, rows, "llrrrrlrrrrrr")


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all cases in order, new ones in place of old ones."""
    rows = {(row["task"], row["batch"]): row for row in merge_rows(old, new, ("task", "batch"))}
    return [rows[case] for task in TASKS for batch in BATCHES if (case := (task, batch)) in rows]


PARSER = make_parser(
    __doc__, work("build/speculation", "where engines are built"),
    output("OUTPUT.json and .md", "perf/results/speculation-prompt-lookup"),
    option("--model", action="append", choices=MODELS, help="only this one; others stay in OUTPUT.json"),
    option("--task", action="append", choices=tuple(TASKS), help="only this one; likewise"),
    option("--batch", type=int, action="append", choices=BATCHES, help="only this one; likewise"),
    option("--seconds", type=float, default=9.0, help="to measure each case for (default 9)"),
    option("--num-speculative-tokens", type=int, default=8), seed(),
)  # fmt: skip


def main() -> None:
    args = PARSER.parse_args()
    known = read_json(args.output.with_suffix(".json"), {}) if args.model or args.task or args.batch else {}
    models: dict[str, list[dict[str, Any]]] = known.get("models", {})
    found: dict[str, list[dict[str, Any]]] = {}
    for model in args.model or MODELS:
        directory = engine_of(model, args.work)
        tokenizer = Tokenizer.from_dir(directory / TOKENIZER_DIR)
        session = load_session(directory, load_manifest(directory))
        drafts = SpeculativeConfig("ngram", args.num_speculative_tokens)
        engines = pair_of(session, tokenizer, drafts, kv_cache_gib=0.1)
        cases = [(task, batch) for task in args.task or TASKS for batch in args.batch or BATCHES]
        bar = tqdm(cases, desc=model, disable=True if args.json else None)
        found[model] = [measure(engines, tokenizer, *case, args) for case in bar]
        models[model] = merged(models.get(model, []), found[model])
    models = {model: models[model] for model in MODELS if model in models}
    result = {
        "machine": platform.processor() or platform.machine(),
        "num_speculative_tokens": args.num_speculative_tokens,
        "models": models,
    }
    text = (
        "# Prompt lookup against plain decoding\n\n`python -m perf.speculation.prompt_lookup` on two cores, bfloat16, "
        f"at most {args.num_speculative_tokens} drafts a sequence and step, prompts of {LENGTH} tokens. Both decode "
        f"the same prompts by turns of {TURN} tokens; speed is that of decoding, ratios are medians of pairs, CPU time "
        "is that of both cores; 'all running' is the ratio before a first sequence was done."
        f"\n\n{table(models)}\n"
    )
    write_report(args.output, result, text)
    print(json.dumps(found, indent=1) if args.json else table(found))


if __name__ == "__main__":
    raise SystemExit(run_main(main))
