"""Log-probabilities of given tokens: the model's own next-token distribution at each of them, through the engine."""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from kvforge.common.errors import EngineError
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.llm import LLM
from kvforge.runtime.scoring.batch import ScoredSequence, build_batch, plan_step
from kvforge.runtime.step.threads import step_threads

ScoreRequest = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context, at least one, and of the continuation to score."""


@dataclass(frozen=True)
class ScoredTokens:
    """The n tokens of one continuation."""

    logprobs: Tensor
    """[n] float32, natural logarithm"""
    is_top: Tensor
    """[n] bool: greedy decoding would have chosen this token (the lowest id among equal logits)"""


@dataclass(frozen=True)
class LogitsChunk:
    """The distributions of consecutive tokens of one continuation."""

    request: int
    """index of the request"""
    start: int
    """place of the first token in the continuation"""
    token_ids: Tensor
    """[k] int64"""
    logits: Tensor
    """[k, vocab] float32: row i is the model's for ``token_ids[i]``, given everything before it"""
    exit_logits: Tensor | None = None
    """as ``logits``, of the early exit, where it was asked for"""


def score(llm: LLM, requests: Sequence[ScoreRequest], *, use_tqdm: bool = False) -> list[ScoredTokens]:
    """Return log-probabilities of every continuation, in order: temperature 1, no penalties, no filters.

    They are those of generation: in a SwiftKV engine all tokens before a scored one have K,V from the cut, which is
    what decoding it would see. No transition of a KV policy takes place: attention sees all
    tokens. Context tokens but the last stop at the cut. Results do not depend on what is scored
    together beyond the rounding of the engine's dtype. Contexts that begin alike are computed once where the engine
    keeps prefixes. An empty continuation has no tokens and costs nothing.

    Raises:
        RequestError: a request cannot be scored (nothing is computed then), or the engine's pages are in use.
        EngineError: the model's logits are not finite.
    """
    scored = [ScoredTokens(torch.empty(len(c)), torch.empty(len(c), dtype=torch.bool)) for _, c in requests]
    total = sum(len(continuation) for _, continuation in requests)
    with (
        tqdm(total=total, desc="Scoring", unit="tok", disable=None if use_tqdm else True, dynamic_ncols=True) as bar,
        closing(stream_logits(llm, requests)) as chunks,
    ):
        for chunk in chunks:
            logprobs, is_top = score_chunk(chunk)
            rows = slice(chunk.start, chunk.start + len(logprobs))
            scored[chunk.request].logprobs[rows], scored[chunk.request].is_top[rows] = logprobs, is_top
            bar.update(len(logprobs))
    return scored


def score_chunk(chunk: LogitsChunk) -> tuple[Tensor, Tensor]:
    """Return the log-probability [k] float32 of each token of a chunk, and whether it is the most probable [k] bool.

    Raises EngineError where the logits are not finite.
    """
    total = chunk.logits.logsumexp(-1)
    if not (total.isfinite().all() and chunk.logits.amin(-1).isfinite().all()):
        raise EngineError("the model's logits are not finite, so nothing can be scored; check the checkpoint.")
    logprobs = chunk.logits.gather(1, chunk.token_ids[:, None])[:, 0] - total
    return logprobs, lowest_argmax(chunk.logits) == chunk.token_ids


def lowest_argmax(logits: Tensor) -> Tensor:
    """Return [k] int64, the lowest index of the largest logit of each row of [k, vocab] without NaN."""
    indices = torch.arange(logits.shape[1], device=logits.device)
    return indices.where(logits == logits.amax(-1, keepdim=True), logits.shape[1]).amin(-1)


def stream_logits(
    llm: LLM, requests: Sequence[ScoreRequest], *, max_survivors: int | None = None, early_exit: bool = False
) -> Generator[LogitsChunk, None, None]:
    """Yield the logits of all continuations, each request's in order, as the engine computes them; see ``score``.

    A chunk holds at most ``manifest.max_num_survivors`` rows, the most that go past the cut in a step, or
    ``max_survivors`` where that is less, and with ``early_exit`` as many of that head. A single request with a context
    of one token comes in chunks of exactly that many rows, the last one aside. Close the iterator to give up early: it
    holds pages of the engine until its end, and what is generated meanwhile has only the others.

    Raises:
        RequestError: as ``score``; at the first ``next``.
        EngineError: the engine is not kvforge's own.
    """
    engine = llm.engine
    if not isinstance(engine, LLMEngine):
        raise EngineError(
            "given tokens are scored by kvforge's own engines alone; build one for another target than vllm, or leave "
            "perplexity and the teacher out."
        )
    pending = deque(
        ScoredSequence(engine, index, *request) for index, request in enumerate(requests) if len(request[1])
    )
    active: list[ScoredSequence] = []
    try:
        while pending or active:
            chunks = plan_step(engine, pending, active, max_survivors)
            batch = build_batch(engine, chunks)
            with step_threads(engine.manifest.num_parameters, batch.lower.input_ids.shape[0]):
                logits = engine.runner.run_batch(batch)
                exits = engine.runner.early_exit(batch) if early_exit and logits is not None else None
            row = 0
            for scored, count in chunks:
                num_rows = scored.num_survivors(count)
                start = scored.advance(engine, count) - num_rows
                if logits is not None and num_rows:
                    token_ids = scored.continuation[start : start + num_rows]
                    rows = slice(row, row + num_rows)
                    exit_logits = None if exits is None else exits[rows]
                    yield LogitsChunk(scored.index, start, token_ids, logits[rows], exit_logits)
                row += num_rows
            for scored in [scored for scored in active if scored.num_left == 0]:
                active.remove(scored)
                scored.release(engine)
    finally:
        for scored in [*active, *pending]:  # of those pending, one that was just being placed
            scored.release(engine)
