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
from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.sessions.session import load_session
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.step.self_draft import MIN_CONFIDENCE
from perf.harness.batch import Batch
from perf.harness.command import make_parser, run_main
from perf.harness.engines import tokenizer_of
from perf.harness.files import read_json, write_json
from perf.harness.options import engine_place, option, place
from perf.harness.plots import panels
from perf.harness.tables import Row, columns_table
from perf.harness.timed_session import TimedSession
from perf.speculation.fixed_length import FixedLength

TASKS = ("needle_single", "list_recall", "amounts")
NUM_PROMPTS, LENGTH, MAX_TOKENS = 16, 300, 64
WORKLOADS = {"answers": 0.0, "text": 0.0, "sampled text": 1.0}
"""Temperature of each: the model's answers to tasks and what it goes on with, and documents that it continues."""
THRESHOLDS = (0.5, 0.8, 0.9, 0.95, 0.99)


def prompts_of(engine: Path, workload: str) -> list[list[int]]:
    """Return ``NUM_PROMPTS`` prompts as token ids."""
    tokenizer = tokenizer_of(engine)
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


def measure(
    directory: Path, prompts: Sequence[list[int]], temperature: float, batch: int, settings: list[Row], repeats: int
) -> list[Row]:
    """Return a row for each setting; the first one is what the others are held against."""
    session = TimedSession(load_session(directory, load_manifest(directory)))
    engines = [make_engine(session, setting) for setting in settings]
    runs: list[list[Row]] = [[] for _ in settings]
    for _ in range(1 + repeats):
        for engine, found in zip(engines, runs, strict=True):
            before = Counter({k: v for k, v in engine.stats().items() if isinstance(v, int)})
            groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
            parts = [decode(engine, session, group, temperature) for group in groups]
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
            **setting, "batch": batch, "tokens_per_s": statistics.median(speeds),
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


def phase(name: str) -> tuple:
    """Return the column of a graph's milliseconds."""
    return name.split("_")[-1], lambda row: row["ms_per_step_in"].get(name, 0.0), ".2f"


def _rest(row: Row) -> float:
    phases = (row["ms_per_step_in"].get(name, 0.0) for name in ("lower", "early_exit", "upper"))
    return row["ms_per_step"] - sum(phases)


def _acceptance(row: Row) -> str:
    drafted = row["num_draft_tokens"]
    return f"{100 * row['num_accepted_draft_tokens'] / drafted:.1f}%" if drafted else ""


CASE = (("workload", "workload"), ("batch", "batch"))
SPEED = (
    ("acceptance", _acceptance), ("tokens a step", "tokens_per_step", ".2f"), ("tokens/s", "tokens_per_s", ".0f"),
    ("speed-up", "speed_up", ".2f"), ("same", lambda row: f"{row['same_texts']}/{row['num_texts']}"),
)  # fmt: skip
DRAFTS = (
    *CASE, ("drafts", "length"), *SPEED, ("ms a step", "ms_per_step", ".2f"),
    *map(phase, ("lower", "early_exit", "upper")), ("the rest", _rest, ".2f"),
)  # fmt: skip
SURE = (*CASE, ("confidence", lambda row: row.get("confidence", "no drafts")), *SPEED)
SHARE = ("share of exits", "share_of_exits", "{:.1f}%", 100)
EXITS = (*CASE, ("threshold", lambda row: row["threshold"] or "off"), SHARE, *SPEED[2:4], ("same texts", *SPEED[4][1:]))
ANSWERS = (
    ("threshold", "threshold"), SHARE, ("exact match", "exits", "{:.1f}%", 100),
    ("full model's", "full", "{:.1f}%", 100),
    ("gained", "gained"), ("lost", "lost"), ("same answers", lambda row: f"{row['same']}/{row['num_prompts']}"),
)  # fmt: skip


def write_report(data: dict[str, list[Row]], source: Path) -> None:
    """Write ``source`` with the endings .md and .svg."""
    parts = [
        "# Early exit at decode, tiny-swiftkv (cut 4 of 8) in bf16 on two cores",
        "Made by `python -m perf.speculation.early_exit`, whose text says how. Acceptance is of the drafts that were "
        "made; tokens per step are of one sequence; *same* are the texts equal to those of plain decoding (in bf16 "
        "near-ties of the two most probable tokens may fall the other way where more rows are computed together).",
        f"## Drafts by the early exit: up to so many, ending where its probability is below {MIN_CONFIDENCE:g}",
        columns_table(DRAFTS, [*data.get("draft", []), *data.get("adaptive", [])]),
        "## Drafts of up to 6 tokens, ending where the exit's probability is below a confidence",
        columns_table(SURE, data.get("sure", [])),
        "## Exits above a threshold: speed",
        columns_table(EXITS, data.get("exit", [])),
        "## Exits above a threshold: answers",
        columns_table(ANSWERS, data.get("quality", [])),
    ]
    source.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    plot(data, source.with_suffix(".svg"))


def plot(data: dict[str, list[Row]], path: Path) -> None:
    """Speed-up over the draft length, and over the exit threshold with the exact match."""
    with panels(path, 11, 4, 2) as (left, right):
        groups: dict[tuple[str, int], list[Row]] = {}
        for row in data.get("draft", []):
            groups.setdefault((row["workload"], row["batch"]), []).append(row)
        for (workload, batch), rows in groups.items():
            style = {"answers": "-o", "text": "--s", "sampled text": ":^"}[workload]
            lengths, speed = [row["length"] for row in rows], [row["speed_up"] for row in rows]
            left.plot(lengths, speed, style, ms=4, label=f"{workload}, batch {batch}")
        left.axhline(1, color="grey", lw=0.8)
        left.set(xlabel="drafts a step", ylabel="tokens/s against plain decoding")
        for batch in sorted({row["batch"] for row in data.get("exit", [])}):
            rows = [r for r in data["exit"] if r["batch"] == batch and r["workload"] == "answers" and r["threshold"]]
            right.plot(
                [r["threshold"] for r in rows], [r["speed_up"] for r in rows], "-o", label=f"speed, batch {batch}"
            )
        quality = data.get("quality", [])
        if quality:
            thresholds = [row["threshold"] for row in quality]
            right.plot(thresholds, [row["exits"] / row["full"] for row in quality], "k--", label="exact match")
            right.plot(thresholds, [row["share_of_exits"] for row in quality], "k:", label="share of exits")
        right.set(xlabel="exit threshold", ylabel="of the full model's")


PARSER = make_parser(
    __doc__, option("what", choices=("draft", "adaptive", "sure", "exit", "quality", "report")),
    engine_place("engine", nargs="?"), place("--json", required=True),
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
    if args.engine is None and args.what != "report":
        PARSER.error(f"{args.what} needs an engine")
    data: dict[str, list[Row]] = read_json(args.json, {})
    if args.what == "report":
        write_report(data, args.json)
        return
    if args.what == "quality":
        data["quality"] = answers_by_threshold(args.engine, args.num_prompts)
    else:
        for batch in args.batch:
            prompts = prompts_of(args.engine, args.workload)[: max(batch, 8)]
            found = measure(args.engine, prompts, WORKLOADS[args.workload], batch, SETTINGS[args.what], args.repeats)
            rows = [{"workload": args.workload, **row} for row in found]
            kept = [r for r in data.get(args.what, []) if (r["workload"], r["batch"]) != (args.workload, batch)]
            data[args.what] = kept + rows
    write_json(args.json, data)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
