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
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from kvforge import LLM, SamplingParams
from kvforge.common.errors import KvforgeError
from kvforge.evaluation.documents import text_documents
from kvforge.manifest import load_manifest
from kvforge.runtime.sessions.session import load_session
from kvforge.runtime.speculation.config import SpeculativeConfig
from perf.harness.engines import tokenizer_of
from perf.harness.experiment import Experiment, Report, engine_place, number, numbers, option, output, place
from perf.real_model.answers import conversations_of
from perf.real_model.closeness import texts_of
from perf.speculation.prompt_lookup import pair_of, paired

KV_CACHE_GIB = 0.5
TEMPERATURE = 0.8
Prompts = tuple[str, list[list[int]], list[SamplingParams]]
"""Kind, tokens, and how each is continued."""


def prompts_of(engine: Path, texts: Path, num: int, length: int, num_tokens: int) -> Iterator[Prompts]:
    """Yield the prompts of each kind, ``num`` of them. Raises KvforgeError where there are none."""
    tokenizer = tokenizer_of(engine)
    if (conversations := texts / "prompts.jsonl").is_file():
        llm = LLM(engine, kv_cache_gib=KV_CACHE_GIB)
        asked = [llm.chat_prompt(row["messages"]).text for row in conversations_of(conversations, num)]
        params = [
            SamplingParams(temperature=TEMPERATURE, max_tokens=num_tokens, ignore_eos=True, seed=seed)
            for seed in range(len(asked))
        ]
        yield "answers", [tokenizer.encode(text, add_special_tokens=False) for text in asked], params
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for file in texts_of(texts):
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
    return {"rows": rows}


EXPERIMENT = Experiment(
    "perf.real_model.speculation", __doc__,
    options=(
        engine_place(), place("texts"), engine_place("--draft-engine", "its drafts, too"),
        option("--exit-threshold", type=float, nargs="*", default=[], metavar="P", help="exits above P, too"),
        numbers("--batch", [1, 8], "prompts at a time (default 1 8)"),
        number("--num-speculative-tokens", 4, "(default %(default)s)"),
        number("--num-prompts", 16, "of a kind (default %(default)s)"),
        number("--length", 512, "tokens of a piece (default %(default)s)"),
        number("--num-tokens", 96, "tokens decoded (default %(default)s)"),
        option("--seconds", type=float, default=9.0, help="for each case at least (default %(default)s)"),
        output("OUTPUT.json and .md"),
    ),
    measure=make_report, is_dated=True, align="lrlrrrlrrrrr",
    columns=(
        ("drafts", "drafts"), ("batch", "batch"), ("kind", "kind"), ("plain tok/s", "plain_tok_s", ".0f"),
        ("with drafts", "drafts_tok_s", ".0f"), ("ratio", "ratio", ".2f"),
        ("95% interval", lambda row: "{:.2f} to {:.2f}".format(*row["interval"])), ("accepted", "acceptance", ".0%"),
        ("a draft", "mean_accepted_length", ".1f"), ("CPU time", "cpu_ratio", ".2f"),
        ("exits", "share_of_exits", ".0%"),
        ("other texts", lambda row: f"{row['pairs_with_other_tokens']} of {row['pairs'] + 1}"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
