"""Whether engines answer instructions greedily as transformers does on the same weights, and how close a call it was
where they do not.

    python -m perf.real_model.agreement CHECKPOINT PROMPTS.jsonl NAME=ENGINE ... [--max-tokens 64]
        [--output perf/results/NAME]

A line of PROMPTS.jsonl is a conversation, such as ``held-out/prompts.jsonl`` of ``perf.real_model.texts``. The
reference is what transformers answers in float32: it is given the first engine's answers and finds the most probable
token before each of theirs; an answer whose token is another one ends there, with its own. So its answers are those of
its decoding, at the cost of a prompt. A row beside the engines is transformers in bf16, given the reference's answers,
which shows what rounding alone does. A row has

- how many answers are the reference's, token for token;
- the share of the reference's tokens that are the most probable ones where its answers are given, with a 95% interval
  over answers;
- the gap at the first other token of an answer: by how much the reference prefers its own one, in logits;
- how far the gap between the reference's two best tokens moves, over all tokens of its answers.

The reference is kept in --work for the next run with the same prompts, and rows of an earlier run in OUTPUT.json stay
where they are not measured again. Writes OUTPUT.json and .md.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvforge import LLM, SamplingParams
from kvforge.checkpoint.model import open_model
from kvforge.evaluation.bootstrap import bootstrap_interval
from kvforge.runtime.scoring.score import lowest_argmax, stream_logits
from perf.harness.engines import tokenizer_of
from perf.harness.experiment import Experiment, Report, interval, named, number, option, output, place, work
from perf.real_model.answers import conversations_of
from perf.real_model.sampled import as_transformers

KEPT = 64
"""Tokens whose logits are kept, of each distribution; a worse one has at least the last one's gap."""
PEER = "transformers, bf16"
Given = Iterator[tuple[int, int, Tensor]]
"""Request, place of the first token, and the logits ``[k, vocab]`` of these tokens of its reference answer."""


@dataclass(frozen=True)
class Answers:
    """Greedy answers, each up to its end token if it has one, and the best ``KEPT`` tokens before each of their tokens:
    ``best`` and ``logits`` ``[n, KEPT]``, largest first."""

    tokens: list[list[int]]
    best: list[Tensor]
    logits: list[Tensor]

    def gap(self, index: int, place: int, token: int) -> float:
        """Return by how much the logit of an answer's own token is above another one's."""
        logits, found = self.logits[index][place], (self.best[index][place] == token).nonzero()
        return float(logits[0] - logits[int(found[0]) if len(found) else -1])


def verified(given: Given, drafts: Sequence[Sequence[int]]) -> Answers:
    """Return what a model answers that finds the logits ``given`` before the tokens of ``drafts``, whole answers each:
    a draft up to the first token that it does not choose, with its own in that place."""
    answers = Answers([], [], [])
    for index, _, logits in given:
        chosen, draft = lowest_argmax(logits).tolist(), list(drafts[index])
        length = next((place + 1 for place, token in enumerate(draft) if token != chosen[place]), len(draft))
        top = logits[:length].float().topk(KEPT)
        answers.tokens.append(chosen[:length])
        answers.best.append(top.indices)
        answers.logits.append(top.values)
    return answers


def row_of(name: str, given: Given, reference: Answers, tokens: Sequence[Sequence[int]] | None = None) -> Report:
    """Return the row of a system that finds the logits ``given`` before the reference's tokens, and whose answers are
    ``tokens``, or as these logits have it."""
    chosen = [torch.empty(len(theirs), dtype=torch.long) for theirs in reference.tokens]
    moves = []
    for index, start, logits in given:
        rows = slice(start, start + len(logits))
        chosen[index][rows] = lowest_argmax(logits)
        gap = logits.float().gather(1, reference.best[index][rows, :2])
        expected = reference.logits[index][rows, :2]
        moves.append((gap[:, 0] - gap[:, 1] - (expected[:, 0] - expected[:, 1])).abs())
    best = [each.tolist() for each in chosen]
    gaps = []
    for index, (ours, theirs) in enumerate(zip(best if tokens is None else tokens, reference.tokens, strict=True)):
        places = (place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        if (place := next(places, None)) is not None:
            gaps.append(reference.gap(index, place, ours[place]))
    hits = [sum(map(int.__eq__, ours, theirs)) for ours, theirs in zip(best, reference.tokens, strict=True)]
    moved = torch.cat(moves)
    return {
        "name": name, "num_answers": len(hits), "num_tokens": len(moved), "same": len(hits) - len(gaps),
        "agreement": asdict(bootstrap_interval(hits, [len(theirs) for theirs in reference.tokens])),
        "gap": _spread(torch.tensor(gaps), 0.5), "moved": _spread(moved, 0.5, 0.999),
    }  # fmt: skip


def _spread(values: Tensor, *levels: float) -> list[float]:
    """These quantiles and the maximum; empty where there are no values."""
    return [round(float(values.quantile(level)), 5) for level in (*levels, 1.0)] if len(values) else []


@torch.inference_mode()
def given_to_model(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Given:
    """Give answers to a model of transformers, one at a time."""
    for index, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        yield index, 0, model(torch.tensor([[*prompt, *tokens[:-1]]]), logits_to_keep=len(tokens)).logits[0]


def reference_of(args: argparse.Namespace, prompts: list[list[int]], drafts: list[list[int]]) -> tuple[Answers, Report]:
    """Return the answers of transformers in float32 and the row of bf16, kept in ``args.work``."""
    file = args.work / f"{args.checkpoint.name}.answers"
    kept = torch.load(file, weights_only=True) if file.is_file() else {}
    if kept.get("for") != [prompts, args.max_tokens]:
        checkpoint = open_model(args.checkpoint)
        exact = as_transformers(checkpoint, "cpu", torch.float32)
        found = verified(given_to_model(exact, prompts, drafts), drafts)
        peer = given_to_model(as_transformers(checkpoint, "cpu", torch.bfloat16), prompts, found.tokens)
        kept = {"for": [prompts, args.max_tokens], "answers": vars(found), "row": row_of(PEER, peer, found)}
        args.work.mkdir(parents=True, exist_ok=True)
        torch.save(kept, file)
    return Answers(**kept["answers"]), kept["row"]


def make_report(args: argparse.Namespace) -> Report:
    """Answer by transformers, then by every engine."""
    conversations, (rows, kept, prompts) = conversations_of(args.prompts, args.num_prompts), ([], None, [])
    for name, engine in tqdm(args.engines, unit="engine", disable=None):
        llm = LLM(engine, kv_cache_gib=args.kv_cache_gib)
        if kept is None:
            texts = [llm.chat_prompt(row["messages"]).text for row in conversations]
            tokenizer = tokenizer_of(engine)
            prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        tokens = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        if kept is None:
            kept = reference_of(args, prompts, tokens)
            rows.append(kept[1])
        given = stream_logits(llm, list(zip(prompts, kept[0].tokens, strict=True)))
        rows.append(row_of(name, ((each.request, each.start, each.logits) for each in given), kept[0], tokens))
    assert kept is not None
    gaps = torch.cat([logits[:, 0] - logits[:, 1] for logits in kept[0].logits])
    return {"gap": _spread(gaps, 0.01, 0.1, 0.5), "rows": rows}


def notes(report: Report) -> str:
    """What the reference is, and how near its two best tokens are."""
    low, tenth, median, _ = report["gap"]
    first = report["rows"][0]
    return (
        f"{first['num_answers']} greedy answers, {first['num_tokens']} tokens. The reference is transformers in "
        f"float32; the gap of its two best tokens, in logits, is below {low:.3f} at 1% of the tokens, below "
        f"{tenth:.3f} at 10%, below {median:.2f} at half."
    )


def _at(name: str, place: int) -> Callable[[Report], str]:
    """Return the value of a column that is one of several numbers, which there may not be."""
    return lambda row: f"{row[name][place]:.2g}" if row[name] else ""


EXPERIMENT = Experiment(
    "perf.real_model.agreement", __doc__,
    options=(
        place("checkpoint", "a directory, or a GGUF file"), place("prompts"),
        option("engines", type=named, nargs="+", metavar="NAME=ENGINE"),
        number("--num-prompts", None, "the first N (default: all)", metavar="N"),
        number("--max-tokens", 64, "of an answer (default %(default)s)"),
        option("--kv-cache-gib", type=float, default=2.0, help="(default %(default)s)"),
        work(what="the reference, kept"), output("OUTPUT.json and .md"),
    ),
    measure=make_report, merged=("name",), is_dated=True, notes=notes, align="lrrrrrrr",
    columns=(
        ("", "name"), ("answers as the reference", "same"),
        ("same best token, %", lambda row: interval(row["agreement"], 2, 100)),
        ("gap at the first other token: median", _at("gap", 0)), ("largest", _at("gap", 1)),
        ("two best tokens' gap moves: median", _at("moved", 0)), ("99.9%", _at("moved", 1)),
        ("largest", _at("moved", 2)),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
