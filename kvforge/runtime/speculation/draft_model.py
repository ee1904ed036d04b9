"""Drafts of a draft model: a second, smaller engine that decodes ahead of the first."""

import logging
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from kvforge.common.errors import EngineError
from kvforge.common.hardware import available_memory_bytes
from kvforge.kv_policies import Need
from kvforge.manifest import TOKENIZER_DIR, Manifest, load_manifest
from kvforge.runtime.config import RuntimeConfig, resolve_config
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.sampling.draw import filter_logits, invert
from kvforge.runtime.sampling.filters import Filters
from kvforge.runtime.sampling.sampler import most_probable
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.sessions.session import Session, load_session
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_cache import DraftCache
from kvforge.runtime.speculation.drafter import Draft
from kvforge.runtime.step.runner import Runner
from kvforge.runtime.step.threads import step_threads
from kvforge.runtime.step.work import WorkListener

logger = logging.getLogger(__name__)

DEFAULT_KV_CACHE_BYTES = 1 << 30
"""Of a draft engine's K,V cache, unless one sequence needs more or all sequences together need less."""
_NOTHING = Draft(())


@dataclass(frozen=True, eq=False)
class _Job:
    """A sequence that gets drafts, at most ``count``; ``probs`` are rows [vocab_size] of those that were drawn."""

    sequence: Sequence
    twin: Sequence
    count: int
    drawn: bool
    probs: list[torch.Tensor] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.twin.tokens[self.sequence.length : self.twin.length].tolist()

    def draft(self) -> Draft:
        return Draft(tuple(self.token_ids), torch.stack(self.probs) if self.probs else None)


class DraftModel:
    """Drafts with an engine of its own, whose K,V cache follows the sequences.

    A call first computes what the draft model has not seen of the sequences, together at most one step of its
    ``max_num_tokens`` tokens; a sequence that has more to catch up with gets its drafts in a later call. Then every
    draft takes one step over all sequences. Drafts of a sequence whose tokens may come of rejection
    (``SamplingState.may_reject``) are drawn as its tokens are; the others are the most probable tokens.

    Sequences for which the cache has no room, or that are longer than the draft engine allows, get no drafts.

    Args:
        session: the draft engine's.
        config: its limits.
        seed: of the draws; anything by default.
    """

    def __init__(self, session: Session, config: RuntimeConfig, seed: int | None = None) -> None:
        self.cache = DraftCache(config)
        self._num_parameters = session.manifest.num_parameters
        self._runner = Runner(session, config)
        self._random = random.Random(seed)
        self._cache_bytes = config.num_pages * session.manifest.page_bytes

    def draft(self, sequences: list[Sequence], counts: list[int]) -> list[Draft]:
        """See ``Drafter``; after an error in the draft engine nothing is kept of these sequences."""
        try:
            jobs = self._jobs(sequences, counts)
            self._decode(jobs)
        except BaseException:
            for sequence in sequences:
                self.forget(sequence)
            raise
        drafts = {job.sequence: job.draft() for job in jobs}
        return [drafts.get(sequence, _NOTHING) for sequence in sequences]

    def watch(self, listener: WorkListener) -> None:
        """Tell ``listener`` of each of the draft engine's steps before it begins."""
        self._runner.watch(listener, "draft")

    def forget(self, sequence: Sequence) -> None:
        """Free the pages of a sequence; idempotent."""
        self.cache.forget(sequence)

    def stats(self) -> dict[str, Any]:
        """Return the draft engine's gauges by name."""
        pool = self.cache.pool
        return {
            "draft_model_num_pages": pool.num_pages,
            "draft_model_num_used_pages": pool.num_used,
            "draft_model_kv_cache_bytes": self._cache_bytes,
            "draft_model_num_steps": self._runner.num_lower_calls,
        }

    def check_invariants(self) -> None:
        """Raise AssertionError unless pages and slots agree (see ``DraftCache``)."""
        self.cache.check_invariants()

    def _jobs(self, sequences: list[Sequence], counts: list[int]) -> list[_Job]:
        jobs: list[_Job] = []
        keep: set[Sequence] = set()
        for sequence, count in zip(sequences, counts, strict=True):
            # The last draft's K,V are not needed.
            count = min(count, self.cache.config.max_seq_len - sequence.length + 1)
            if count < 1:
                self.forget(sequence)
                continue
            twin = self.cache.follow(sequence, count, keep)
            if twin is not None:
                keep.add(sequence)
                state = sequence.sampling
                jobs.append(_Job(sequence, twin, count, drawn=state is not None and state.may_reject))
        return jobs

    def _decode(self, jobs: list[_Job]) -> None:
        plan = Schedule(self.cache.config.max_num_tokens)
        for job in jobs:
            num_tokens = min(job.twin.length - job.twin.num_computed, plan.budget)
            if num_tokens > 0:
                plan.prefills.append((job.twin, num_tokens))
                plan.budget -= num_tokens
        survivors = set(plan.survivors)
        jobs = [job for job in jobs if job.twin in survivors]
        logits = self._run(plan)
        while logits is not None:
            jobs = self._extend(jobs, logits)
            if not jobs:
                break
            logits = self._run(Schedule(0, decodes=[job.twin for job in jobs]))

    @torch.inference_mode()
    def _run(self, plan: Schedule) -> torch.Tensor | None:
        if not plan:
            return None
        with step_threads(self._num_parameters, plan.num_tokens):
            logits = self._runner.run(plan, self.cache.slots)
        self.cache.computed(plan.sequences, [1] * len(plan.decodes) + [count for _, count in plan.prefills])
        return logits

    @torch.inference_mode()
    def _extend(self, jobs: list[_Job], logits: torch.Tensor) -> list[_Job]:
        """Give every job its next draft; return the jobs that need another."""
        best, not_finite = most_probable(logits)
        tokens = best.tolist()
        drawn = [row for row, job in enumerate(jobs) if job.drawn]
        if drawn:
            picked, probs = self._draw(logits[drawn], [jobs[row].sequence for row in drawn])
            for index, row in enumerate(drawn):
                tokens[row] = picked[index]
                jobs[row].probs.append(probs[index])
        rows = [row for row in range(len(jobs)) if row not in not_finite]
        for row in not_finite:
            if jobs[row].drawn:
                jobs[row].probs.pop()
        self.cache.append([jobs[row].twin for row in rows], [tokens[row] for row in rows])
        return [
            job
            for row, job in ((row, jobs[row]) for row in rows)
            if job.twin.length - job.sequence.length < job.count and tokens[row] not in job.sequence.stop_ids
        ]

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], torch.Tensor]:
        filters = Filters.of([sequence.sampling for sequence in sequences], logits)
        probs = (filter_logits(logits, filters) / filters.temperature[:, None]).softmax(-1)
        uniform = torch.tensor([self._random.random() for _ in sequences], device=logits.device)
        return invert(probs, uniform).tolist(), probs


def make_drafter(config: SpeculativeConfig, manifest: Manifest, runtime: RuntimeConfig) -> DraftModel:
    """Return the drafter of ``config.draft_engine`` for an engine with ``manifest``.

    Its cache has room for as many sequences as run at once where ``DEFAULT_KV_CACHE_BYTES`` hold them, but always
    for one.

    Raises:
        EngineError: the draft engine cannot be loaded, its vocabulary is another, or it does not keep all K,V.
    """
    assert config.draft_engine is not None
    draft = load_manifest(config.draft_engine)
    _check_vocabulary(manifest, draft)
    if Need.OWN_CACHE in draft.policy.needs:
        raise EngineError(
            f"the draft engine has the KV policy {draft.kv_policy}, but drafts need all K and V; rebuild it without."
        )
    if draft.policy.sealing is not None:
        raise EngineError(
            f"the draft engine has a cache of {draft.kv_dtype}, whose pages are sealed before drafts are verified; "
            "rebuild it with another --kv-dtype."
        )
    if draft.model.is_blind:
        raise EngineError(
            "the draft engine's model has a blind cut, and drafts are made without pages above one; draft with a model "
            "that has another cut, or none."
        )
    if (states := draft.model.linear) is not None:
        raise EngineError(
            f"the draft engine's model has {states.title}, whose states cannot go back behind drafts that are not "
            "accepted; draft with a model without it."
        )
    max_seq_len, page_bytes = min(runtime.max_seq_len, draft.max_seq_len), draft.page_bytes
    one_sequence = -(-max_seq_len // draft.page_size) * page_bytes
    resolved = resolve_config(
        draft,
        available_memory_bytes(),
        kv_cache_gib=max(DEFAULT_KV_CACHE_BYTES, one_sequence) / 2**30,
        max_num_seqs=min(runtime.max_num_seqs, draft.max_num_seqs),
        max_seq_len=max_seq_len,
    )
    try:
        return DraftModel(load_session(config.draft_engine, draft), resolved)
    except (RuntimeError, MemoryError) as error:
        raise EngineError(
            f"the draft engine and its KV cache of {resolved.num_pages * page_bytes / 2**30:.3g} GiB do not fit beside "
            "the engine; lower --kv-cache-gib."
        ) from error


def _check_vocabulary(target: Manifest, draft: Manifest) -> None:
    if draft.vocab_size != target.vocab_size:
        raise EngineError(
            f"the draft engine has {draft.vocab_size} tokens and the engine {target.vocab_size}; draft with a model "
            "that has the same tokenizer."
        )
    name = f"{TOKENIZER_DIR}/tokenizer.json"
    if draft.files.get(name) != target.files.get(name):
        raise EngineError("the draft engine has another tokenizer than the engine; draft with a model that shares it.")
