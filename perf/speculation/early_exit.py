"""What the early exit of an engine gives at decode: as a drafter of its own full model, and as the last word.

    kvforge build model_defs/assets/tiny-swiftkv -o ENGINE --max-draft-len 6
    python -m perf.speculation.early_exit draft ENGINE --batch 1 4 --json FILE   # acceptance, speed by draft length
    python -m perf.speculation.early_exit sure ENGINE --json FILE                 # by the confidence drafts ask for
    python -m perf.speculation.early_exit exit ENGINE --json FILE                 # speed by exit threshold
    python -m perf.speculation.early_exit quality ENGINE --json FILE              # answers by exit threshold
    python -m perf.speculation.early_exit report --json FILE                      # FILE's tables and figure beside it

Each adds its rows to FILE and replaces those of the same setting. Speeds are of decoding alone, prompts excluded: each
setting runs once to warm up, then several times in turn with the others, and its median counts.
"""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvforge.evaluation.documents import generated_documents
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.exit_quality import answer_with_exits, exit_quality
from kvforge.evaluation.run import EvalOptions, make_prompts
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.sessions.session import load_session
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.step.self_draft import MIN_CONFIDENCE
from kvforge.runtime.text.tokenizer import Tokenizer
from perf.harness.batch import Batch
from perf.harness.command import make_parser, run_main
from perf.harness.files import read_json, write_json
from perf.harness.options import option, place
from perf.harness.tables import Row
from perf.harness.timed_session import TimedSession
from perf.speculation.early_exit_report import write_report
from perf.speculation.fixed_length import FixedLength

TASKS = ("needle_single", "list_recall", "amounts")
NUM_PROMPTS, LENGTH, MAX_TOKENS = 16, 300, 64
WORKLOADS = {"answers": 0.0, "text": 0.0, "sampled text": 1.0}
"""Temperature of each: the model's answers to tasks and what it goes on with, and documents that it continues."""
THRESHOLDS = (0.5, 0.8, 0.9, 0.95, 0.99)


def prompts_of(engine: Path, workload: str) -> list[list[int]]:
    """Return ``NUM_PROMPTS`` prompts as token ids."""
    tokenizer = Tokenizer.from_dir(engine / TOKENIZER_DIR)
    assert tokenizer is not None
    if workload != "answers":
        return [document[: LENGTH // 2] for document in generated_documents(tokenizer, NUM_PROMPTS, LENGTH, 0)]
    examples = make_prompts(engine, EvalOptions(TASKS, -(-NUM_PROMPTS // len(TASKS)), LENGTH))
    return [tokenizer.encode(e.prompt) for group in zip(*examples.values(), strict=True) for e in group][:NUM_PROMPTS]


def make_engine(session: TimedSession, setting: Row) -> LLMEngine:
    """Return an engine for a setting: ``length`` drafts (0: none, "adaptive": as many as pay, of up to 6), drafted
    above ``confidence``, or exits above ``threshold``."""
    length, threshold = setting.get("length", 0), setting.get("threshold")
    config = SpeculativeConfig("early_exit", 6 if length == "adaptive" else length) if length else None
    engine = LLMEngine(session=session, enable_prefix_cache=False, speculative=config, early_exit_threshold=threshold)
    engine.runner.self_draft.min_confidence = setting.get("confidence", MIN_CONFIDENCE)
    if engine.drafting.is_on and length != "adaptive":
        engine.drafting._lengths = FixedLength(length)
    return engine


def decode(engine: LLMEngine, session: TimedSession, prompts: Sequence[list[int]], temperature: float) -> Row:
    """Serve prompts together; returns seconds, steps and tokens after the prompts, and all texts."""
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    batch = Batch(engine, prompts, params)
    batch.start()
    session.seconds.clear()
    begin, steps = time.perf_counter(), engine.num_iterations
    tokens = batch.finish()
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds, "steps": engine.num_iterations - steps, "tokens": tokens, "texts": batch.tokens,
        "phases": dict(session.seconds),
    }  # fmt: skip


def measure(directory: Path, workload: str, batch: int, settings: list[Row], repeats: int) -> list[Row]:
    """Return a row for each setting; the first one is what the others are held against."""
    session = TimedSession(load_session(directory, load_manifest(directory)))
    prompts = prompts_of(directory, workload)[: max(batch, 8)]
    engines = [make_engine(session, setting) for setting in settings]
    runs: list[list[Row]] = [[] for _ in settings]
    for _ in range(1 + repeats):
        for engine, found in zip(engines, runs, strict=True):
            before = Counter({k: v for k, v in engine.stats().items() if isinstance(v, int)})
            groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
            parts = [decode(engine, session, group, WORKLOADS[workload]) for group in groups]
            after = engine.stats()
            total: Row = {name: sum(part[name] for part in parts) for name in ("seconds", "steps", "tokens")}
            total["texts"] = [text for part in parts for text in part["texts"]]
            total["phases"] = sum((Counter(part["phases"]) for part in parts), Counter[str]())
            for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_early_exits"):
                total[name] = after[name] - before[name]
            found.append(total)
    rows = []
    for setting, (_, *found) in zip(settings, runs, strict=True):
        speeds = [run["tokens"] / run["seconds"] for run in found]
        run = sorted(found, key=lambda run: run["tokens"] / run["seconds"])[len(found) // 2]
        rows.append({
            **setting, "workload": workload, "batch": batch, "tokens_per_s": statistics.median(speeds),
            "tokens_per_s_range": [min(speeds), max(speeds)], "tokens_per_step": run["tokens"] / run["steps"] / batch,
            "num_draft_tokens": run["num_draft_tokens"], "num_accepted_draft_tokens": run["num_accepted_draft_tokens"],
            "share_of_exits": run["num_early_exits"] / run["tokens"],
            "same_texts": sum(a == b for a, b in zip(run["texts"], runs[0][-1]["texts"], strict=True)),
            "num_texts": len(run["texts"]), "ms_per_step": 1e3 * run["seconds"] / run["steps"],
            "ms_per_step_in": {name: 1e3 * value / run["steps"] for name, value in run["phases"].items()},
        })  # fmt: skip
    for row in rows:
        row["speed_up"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
    return rows


def answers_by_threshold(directory: Path, num_prompts: int) -> list[Row]:
    """Return the exact match of the tasks at every threshold, all tasks together and paired with the full model's."""
    examples = make_prompts(directory, EvalOptions(TASKS, num_prompts, LENGTH, seed=1))
    full = EngineGenerator(directory, LENGTH, show_progress=False)
    answers = {task: full.answer([example.prompt for example in wanted]) for task, wanted in examples.items()}
    rows = []
    for threshold in THRESHOLDS:
        quality = exit_quality(examples, answers, answer_with_exits(directory, threshold, LENGTH, examples))
        rows.append({
            "threshold": threshold, "share_of_exits": quality.share, "num_prompts": num_prompts * len(TASKS),
            "full": statistics.fmean(row.full for row in quality.tasks),
            "exits": statistics.fmean(row.exits for row in quality.tasks),
            "gained": sum(row.paired.gained for row in quality.tasks),
            "lost": sum(row.paired.lost for row in quality.tasks), "same": sum(row.num_same for row in quality.tasks),
        })  # fmt: skip
    return rows


PARSER = make_parser(
    __doc__, option("what", choices=("draft", "adaptive", "sure", "exit", "quality", "report")),
    place("engine", nargs="?"), place("--json", required=True),
    option("--workload", choices=tuple(WORKLOADS), default="answers"),
    option("--batch", type=int, nargs="+", default=[1], help="sequences decoded together (default 1)"),
    option("--repeats", type=int, default=3),
    option("--num-prompts", type=int, default=100, help="prompts of each task for quality (default 100)"),
)  # fmt: skip
SETTINGS: dict[str, list[Row]] = {
    "draft": [{"length": 0}, *({"length": length} for length in range(1, 7))],
    "adaptive": [{"length": 0}, {"length": "adaptive"}],
    "sure": [{"length": 0}, *({"length": 6, "confidence": p} for p in (0.0, 0.2, 0.4, 0.6, 0.8, 0.95))],
    "exit": [{"threshold": None}, *({"threshold": threshold} for threshold in THRESHOLDS)],
}


def main() -> None:
    """Measure or report; see the module's text."""
    args = PARSER.parse_args()
    data: dict[str, list[Row]] = read_json(args.json, {})
    if args.what == "report":
        write_report(data, args.json)
        return
    if args.what == "quality":
        data["quality"] = answers_by_threshold(args.engine, args.num_prompts)
    else:
        for batch in args.batch:
            rows = measure(args.engine, args.workload, batch, SETTINGS[args.what], args.repeats)
            kept = [r for r in data.get(args.what, []) if (r["workload"], r["batch"]) != (args.workload, batch)]
            data[args.what] = kept + rows
    write_json(args.json, data)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
