"""Answers of the tiny models at 2048 tokens of context under every rule of eviction, over the budget.

    python -m perf.quality.eviction [--work DIR] [--num-prompts 40] [--rule h2o] [--budget 256] [--cut-budget 512]
        [--model "no cut"]

Most rules' graphs do not know the budget: each model has an engine for such a rule, and its copies differ in their
manifests.
Questions come last in these prompts; docs/kv-policies.md says which rules may look at them. Rules that observe every
query have no row under the cut. Everything under --work is kept: an interrupted run continues, a larger --num-prompts
asks only the new prompts. Writes OUTPUT.json, .md and .png.
"""

import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.kv_policies import Need, parse, policies
from kvforge.kv_policies.eviction.policy import Eviction
from perf.harness.command import positive, run_main
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.policy_engines import with_parameters
from perf.quality.answers import Questions
from perf.quality.eviction_report import write_report
from perf.quality.scores import quality_parser

MODELS = {"no cut": TEACHER_DIR, "cut 4 of 8, 2-way": STUDENT_DIR}
BUDGETS = (64, 128, 256, 512, 1024)
RULES = sorted(name for name, policy in policies().items() if issubclass(policy, Eviction))


def policy_of(rule: str, budget: int) -> str:
    """Return the policy of a cell; RoCo's spread is an eighth of the budget."""
    more = f",spread={budget // 8}" if rule == "roco" else ""
    return f"{rule}:budget={budget}{more}"


def engine_of(model: str, rule: str, budget: int | None, length: int, work: Path) -> Path:
    """Return the engine of a cell, built or copied if it is not there yet."""
    slug = model.replace(", ", "-").replace(" ", "-")
    policy = rule if budget is None else policy_of(rule, budget)
    knows_budget = budget is not None and policies()[rule]().insertion.views_pools
    largest = policy if budget is None or knows_budget else policy_of(rule, max(BUDGETS))
    options = BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=length + MAX_ANSWER_TOKENS, kv_policy=largest)
    name = f"{slug}-{rule}-{length}" + (f"-own-{budget}" if knows_budget else "")
    built = cached_engine(work / "engines" / name, MODELS[model], options)
    if budget is None or knows_budget:
        return built
    return with_parameters(built, built.with_name(f"{built.name}-{budget}"), policy)


def cells_of(models: list[str], rules: list[str], budgets: dict[str, list[int]]) -> list[tuple[str, str, int | None]]:
    """Return (model, rule, budget), full attention of each model first; ``budgets`` are by model."""
    cells: list[tuple[str, str, int | None]] = []
    for model in models:
        cells.append((model, "full", None))
        for rule in rules:
            if model != "no cut" and Need.ALL_QUERIES in policies()[rule]().needs:
                continue
            for budget in budgets[model]:
                try:
                    parse(policy_of(rule, budget))
                except BuildError:
                    continue  # less than it protects
                cells.append((model, rule, budget))
    return cells


def main() -> None:
    """Answer and report."""
    length = 2048 - MAX_ANSWER_TOKENS
    parser = quality_parser(__doc__, "eviction-quality", 40, length, "engines and answers", "OUTPUT.json, .md and .png")
    parser.add_argument("--rule", action="append", choices=RULES, help="default: all; may be given several times")
    parser.add_argument("--budget", action="append", type=positive, help=f"default: {', '.join(map(str, BUDGETS))}")
    parser.add_argument("--cut-budget", action="append", type=positive, help="with a cut; default: those of --budget")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: both")
    args = parser.parse_args()
    questions = Questions.of(args)
    results: list[dict[str, Any]] = []
    budgets = args.budget or list(BUDGETS)
    by_model = {model: budgets if model == "no cut" else args.cut_budget or budgets for model in MODELS}
    cells = cells_of(args.model or list(MODELS), args.rule or RULES, by_model)
    with tqdm(cells, unit="engine", disable=None) as bar:
        for model, rule, budget in bar:
            bar.set_description(f"{model}, {rule} {budget or ''}")
            engine = engine_of(model, rule, budget, args.length, args.work)
            results.append({"model": model, "rule": rule, "budget": budget, **questions.ask(engine)})
    chosen = {"rule": args.rule, "budget": args.budget, "cut-budget": args.cut_budget, "model": args.model}
    options = [f' --{name} "{value}"' for name, values in chosen.items() for value in values or ()]
    settings = {
        "command": f"python -m perf.quality.eviction --num-prompts {args.num_prompts}{''.join(options)}",
        "prompt_tokens": args.length,
        "seed": args.seed,
    }
    write_report(results, settings, args.output)
    print(args.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(run_main(main))
