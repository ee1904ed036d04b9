"""Drafts of a real model, and early exits: tokens a second with them against plain decoding, and how many are right.

    python -m perf.real_model.speculation ENGINE TEXTS [--draft-engine SMALLER] [--batch 1 8]
        [--exit-threshold 0.8] [--output perf/results/NAME]

ENGINE is built with --max-draft-len. TEXTS has ``prompts.jsonl``, conversations that are answered at temperature 0.8,
each with a seed of its own, and a text file for each kind, of which pieces of ``--length`` tokens are continued
greedily: such as the ``held-out`` of ``perf.real_model.texts``. Drafts are prompt lookup's and, with --draft-engine,
those of another engine, such as one of the same model with int4 weights; of an engine with an early exit they are the
exit's alone, and --exit-threshold P adds tokens that exit above P without being verified. Both decode the same prompts
by turns, as ``perf.speculation.prompt_lookup`` has it: ratios are medians of pairs, with 95% intervals over them; other
texts are those of batches with exits or drafts that differ. Writes OUTPUT.json and .md.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge import LLM, SamplingParams
from kvforge.common.errors import KvforgeError
from kvforge.evaluation.documents import text_documents
from kvforge.manifest import load_manifest
from kvforge.runtime.sessions.session import load_session
from kvforge.runtime.speculation.config import SpeculativeConfig
from perf.harness.command import Report, add_report, begin_dated_report, make_parser, positive, run_program
from perf.harness.engines import tokenizer_of
from perf.harness.tables import markdown_table
from perf.speculation.prompt_lookup import pair_of, paired

KV_CACHE_GIB = 0.5
TEMPERATURE = 0.8
Prompts = tuple[str, list[list[int]], list[SamplingParams]]
"""Kind, tokens, and how each is continued."""


def prompts_of(engine: Path, texts: Path, num: int, length: int, num_tokens: int) -> Iterator[Prompts]:
    """Yield the prompts of each kind, ``num`` of them. Raises KvforgeError where there are none."""
    tokenizer = tokenizer_of(engine)
    conversations = texts / "prompts.jsonl"
    if conversations.is_file():
        llm = LLM(engine, kv_cache_gib=KV_CACHE_GIB)
        lines = conversations.read_text(encoding="utf-8").splitlines()[:num]
        asked = [llm.chat_prompt(json.loads(line)["messages"]).text for line in lines]
        params = [
            SamplingParams(temperature=TEMPERATURE, max_tokens=num_tokens, ignore_eos=True, seed=seed)
            for seed in range(len(asked))
        ]
        yield "answers", [tokenizer.encode(text, add_special_tokens=False) for text in asked], params
    files = sorted(texts.glob("*.txt"))
    if not files:
        raise KvforgeError(f"{texts} has no .txt file; perf.real_model.texts writes some.")
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for file in files:
        pieces = text_documents(file, tokenizer, num, length)
        yield file.stem, pieces, [greedy] * len(pieces)


def drafters_of(args: argparse.Namespace) -> dict[str, tuple[SpeculativeConfig | None, float | None]]:
    """Return what is measured by its name: drafts, or the threshold of exits."""
    num, drafters = args.num_speculative_tokens, dict[str, tuple[SpeculativeConfig | None, float | None]]()
    if load_manifest(args.engine).model.early_exit:
        drafters["early exit"] = SpeculativeConfig("early_exit", num), None
        drafters |= {f"exits above {threshold:g}": (None, threshold) for threshold in args.exit_threshold}
    elif args.exit_threshold:
        raise KvforgeError(f"{args.engine} has no early exit; leave out --exit-threshold.")
    else:
        drafters["ngram"] = SpeculativeConfig("ngram", num), None
    if args.draft_engine is not None:
        drafters["draft model"] = SpeculativeConfig("draft_model", num, draft_engine=args.draft_engine), None
    return drafters


def make_report(args: argparse.Namespace) -> Report:
    """Measure every drafter on every kind at every batch."""
    drafters = drafters_of(args)
    kinds = list(prompts_of(args.engine, args.texts, args.num_prompts, args.length, args.num_tokens))
    session, rows = load_session(args.engine, load_manifest(args.engine)), []
    for drafter, (config, threshold) in drafters.items():
        engines = pair_of(session, tokenizer_of(args.engine), config, KV_CACHE_GIB, threshold)
        cases = [(kind, batch) for batch in args.batch for kind in kinds]
        for (kind, prompts, params), batch in tqdm(cases, desc=drafter, disable=None):
            found = paired(engines, prompts, params, batch, args.seconds)
            kept = {key: found[key] for key in found if key != "ratios" and not key.startswith("full_batch")}
            rows.append({"drafts": drafter, "kind": kind, **kept})
    return {**begin_dated_report("perf.real_model.speculation"), "rows": rows}


def markdown(report: Report) -> str:
    """A row for each drafter, batch and kind."""
    head = ["drafts", "batch", "kind", "plain tok/s", "with drafts", "ratio", "95% interval", "accepted", "a draft"]
    head += ["CPU time", "exits", "other texts"]
    lines = [f"`{report['command']}`, {report['date']}, {report['machine']}", ""]
    return "\n".join([*lines, markdown_table(head, [_cells(row) for row in report["rows"]], "lrlrrrlrrrrr")]) + "\n"


def _cells(row: dict[str, Any]) -> list[Any]:
    low, high = row["interval"]
    return [
        *(row["drafts"], row["batch"], row["kind"], f"{row['plain_tok_s']:.0f}", f"{row['drafts_tok_s']:.0f}"),
        *(f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}"),
        *(f"{row['acceptance']:.0%}", f"{row['mean_accepted_length']:.1f}", f"{row['cpu_ratio']:.2f}"),
        *(f"{row['share_of_exits']:.0%}", f"{row['pairs_with_other_tokens']} of {row['pairs'] + 1}"),
    ]


def main() -> int:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--draft-engine", type=Path, help="its drafts, too")
    parser.add_argument("--exit-threshold", type=float, nargs="*", default=[], metavar="P", help="exits above P, too")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8], help="prompts at a time (default 1 8)")
    parser.add_argument("--num-speculative-tokens", type=positive, default=4, help="(default %(default)s)")
    parser.add_argument("--num-prompts", type=positive, default=16, help="of a kind (default %(default)s)")
    parser.add_argument("--length", type=positive, default=512, help="tokens of a piece (default %(default)s)")
    parser.add_argument("--num-tokens", type=positive, default=96, help="tokens decoded (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=9.0, help="for each case at least (default %(default)s)")
    add_report(parser, "OUTPUT.json and .md")
    args = parser.parse_args()
    return run_program(args, lambda: make_report(args), markdown, markdown=True)


if __name__ == "__main__":
    raise SystemExit(main())
