"""How often an engine's early exit says what its full model says, against the exit's confidence (arXiv 2410.03960,
appendix D, Figure D.1): KV is complete at the cut, so a token may end there when the exit is sure of it."""

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kvforge.common.errors import EngineError, KvforgeError
from kvforge.common.figures import new_figure, save_figure
from kvforge.evaluation.engine import check_finished
from kvforge.evaluation.score import wilson
from kvforge.runtime import LLM, SamplingParams
from kvforge.runtime.scoring.score import lowest_argmax, stream_logits
from kvforge.runtime.sessions.missing import NO_EARLY_EXIT
from kvforge.runtime.step.early_exit import confidence

THRESHOLDS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Confidences above which a token would exit; the paper's is 0.95."""

Document = tuple[Sequence[int], Sequence[int]]
"""Token ids that are given, at least one, and those before each of which both heads are asked what comes next."""


@dataclass(frozen=True)
class ConfidenceRange:
    """The tokens whose most probable continuation has, by the exit, a probability from ``low`` to ``high``.

    ``num_agree`` of them have the same most probable continuation by the full model; ``share`` is of all tokens.
    ``alignment`` is ``num_agree / num_tokens`` with its 95% Wilson interval, None where there are no tokens. The
    interval takes tokens as independent, which those of one document are not quite.
    """

    low: float
    high: float
    num_tokens: int
    num_agree: int
    share: float
    alignment: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Alignment:
    """Agreement of the early exit with the full model. ``bins`` of equal width hold each token once, the bound between
    two in the higher one; ``above`` holds for each threshold the tokens with more confidence than that."""

    all: ConfidenceRange
    bins: tuple[ConfidenceRange, ...]
    above: tuple[ConfidenceRange, ...]


def alignment(
    llm: LLM,
    documents: Sequence[Document],
    *,
    bins: int = 20,
    thresholds: Sequence[float] = THRESHOLDS,
    use_tqdm: bool = False,
) -> Alignment:
    """Run documents through the engine, each token given (teacher forcing), and ask both heads at the counted places.

    A document of text is ``(tokens[:1], tokens[1:])``. ``generated`` makes those of decoding, where a token would exit:
    prompts and the full model's own answers. Probabilities are of temperature 1.

    Raises:
        EngineError: the engine has no early exit, or its logits are not finite.
        RequestError: a document does not fit the engine.
        KvforgeError: there are no tokens to count.
    """
    if not llm.engine.manifest.model.early_exit:
        raise EngineError(NO_EARLY_EXIT)
    total = sum(len(continuation) for _, continuation in documents)
    if not total:
        raise KvforgeError("the documents have no tokens after those that are given; give longer ones.")
    confidence, agrees = torch.empty(total), torch.empty(total, dtype=torch.bool)
    done = 0
    with (
        tqdm(total=total, desc="Early exit", unit="tok", disable=None if use_tqdm else True, dynamic_ncols=True) as bar,
        closing(stream_logits(llm, documents, early_exit=True)) as chunks,
    ):
        for chunk in chunks:
            assert chunk.exit_logits is not None
            here = slice(done, done := done + len(chunk.logits))
            confidence[here], agrees[here] = confidence_and_agreement(chunk.exit_logits, chunk.logits)
            bar.update(len(chunk.logits))
    return count_alignment(confidence, agrees, bins, thresholds)


def generated(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, *, use_tqdm: bool = False) -> list[Document]:
    """Return prompts (token ids) with the full model's greedy answers of up to ``max_tokens`` tokens, as documents.

    Raises:
        RequestError: a prompt cannot be served.
        EngineError: one failed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    results = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=use_tqdm)
    outputs = [result.outputs[0] for result in results]
    check_finished(outputs)
    return [(prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]


def confidence_and_agreement(exit_logits: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exit's largest probability [n] float32, and whether both rows of logits [n, vocab] have their maximum
    at the same token [n] bool. Raises EngineError where logits are not finite."""
    sure = confidence(exit_logits)
    if not (sure.isfinite().all() and logits.logsumexp(-1).isfinite().all()):
        raise EngineError("the model's logits are not finite, so nothing can be compared; check the checkpoint.")
    return sure, lowest_argmax(exit_logits) == lowest_argmax(logits)


def count_alignment(
    confidence: Tensor, agrees: Tensor, bins: int = 20, thresholds: Sequence[float] = THRESHOLDS
) -> Alignment:
    """Return the alignment of n >= 1 tokens from their confidence [n] in 0..1 and their agreement [n] bool."""
    if bins < 1:
        raise KvforgeError(f"{bins} bins cannot hold tokens; give at least 1.")

    def among(low: float, high: float, chosen: Tensor) -> ConfidenceRange:
        count, agree = int(chosen.sum()), int((agrees & chosen).sum())
        share = count / len(confidence)
        if not count:
            return ConfidenceRange(low, high, 0, 0, share, None, None)
        return ConfidenceRange(low, high, count, agree, share, agree / count, wilson(agree, count))

    edges = [index / bins for index in range(bins + 1)]
    place = torch.bucketize(confidence, torch.tensor(edges[1:-1]), right=True)
    return Alignment(
        among(0.0, 1.0, torch.ones_like(agrees)),
        tuple(among(low, high, place == index) for index, (low, high) in enumerate(itertools.pairwise(edges))),
        tuple(among(threshold, 1.0, confidence > threshold) for threshold in thresholds),
    )


def alignment_table(result: Alignment) -> str:
    """A text table: all tokens, those above each threshold, and the bins that have tokens; shares in per cent."""
    lines = [f"{'confidence':<15}{'tokens':>9}{'share':>8}{'alignment':>11}   95% interval"]
    rows = [("all", result.all)]
    rows += [(f"above {row.low:g}", row) for row in result.above]
    rows += [(f"{row.low:.2f} to {row.high:.2f}", row) for row in result.bins if row.num_tokens]
    for name, row in rows:
        line = f"{name:<15}{row.num_tokens:>9}{100 * row.share:>7.1f}%"
        if row.alignment is not None and row.interval is not None:
            low, high = row.interval
            line += f"{100 * row.alignment:>10.1f}%   {100 * low:.1f} to {100 * high:.1f}"
        lines.append(line)
    return "\n".join(lines)


def plot_alignment(result: Alignment, path: Path) -> None:
    """Write the share of tokens and their alignment with its interval over the exit's confidence.

    Raises:
        KvforgeError: matplotlib is missing, or ``path`` cannot be plotted to.
    """
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    width = result.bins[0].high - result.bins[0].low
    left.bar([row.low for row in result.bins], [row.share for row in result.bins], width, align="edge")
    left.set(xlim=(0, 1), xlabel="probability of the exit's token", ylabel="share of tokens")
    for row in result.bins:
        if row.alignment is not None and row.interval is not None:
            errors = [[row.alignment - row.interval[0]], [row.interval[1] - row.alignment]]
            right.errorbar((row.low + row.high) / 2, row.alignment, errors, fmt="o", color="C0", capsize=2)
    right.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="probability of the exit's token", ylabel="alignment with the model")
    right.grid(alpha=0.3)
    save_figure(figure, path)
