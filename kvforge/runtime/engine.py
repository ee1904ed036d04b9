"""The in-flight batching engine: requests in, tokens out, one ``step()`` at a time."""

import itertools
import logging
import time
import weakref
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch

from kvforge.common.errors import EngineError, RequestError, let_end, refusal_of
from kvforge.common.exact_intervals import ExactTokens
from kvforge.common.hardware import available_memory_bytes
from kvforge.common.refusals import Refusal
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime.admission import check_request, new_request
from kvforge.runtime.async_scheduling import check_async_scheduling
from kvforge.runtime.config import resolve_config
from kvforge.runtime.guides.compiler import GuideCompiler
from kvforge.runtime.guides.guide import Guide
from kvforge.runtime.prefixes.open_tier import open_tier
from kvforge.runtime.prefixes.options import PrefixOptions
from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import FinishReason, Request, Sequence, Status
from kvforge.runtime.sampling.sampler import SampledTokens, sample
from kvforge.runtime.sampling.state import RequestSampling
from kvforge.runtime.scheduling.deadlines import Deadlines
from kvforge.runtime.scheduling.invariants import check_invariants
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.sessions.session import Session, load_session
from kvforge.runtime.speculation.config import SpeculativeConfig, check_speculation
from kvforge.runtime.speculation.drafting import Drafting, NoDrafting
from kvforge.runtime.speculation.verification import Verifier
from kvforge.runtime.statistics.cache import cache_stats
from kvforge.runtime.statistics.counters import EngineStatistics
from kvforge.runtime.step.flight import Flight, leave, note_scores
from kvforge.runtime.step.runner import Runner
from kvforge.runtime.step.threads import step_threads
from kvforge.runtime.step.work import Work, WorkListener
from kvforge.runtime.text.stop import StopReason, end_of
from kvforge.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
PAGES_S = 0.02
"""How long a step that has nothing to compute waits for pages that are being read."""


class LLMEngine:
    """Serves many requests at once on one engine. Not thread-safe: call it from one thread.

    Args:
        engine_dir: what ``kvforge build`` wrote; or pass ``session`` (and ``tokenizer``) instead.
        num_pages: K,V pages to allocate; default from ``kv_cache_gib``, see ``config.resolve_config``.
        num_state_pages: pages of the KV policy's own to allocate beside them; default likewise.
        num_upper_pages: pages of the owners above a blind cut to allocate; default likewise.
        snapshot_every, num_snapshots: of how many pages of a sequence the prefix cache keeps one state of layers that
            keep states, where prompts that begin alike go on, and how many states at most; 0 pages: none, and no
            prefix is reused. Default likewise.
        enable_prefix_cache: keep the pages of finished sequences for prompts that begin alike.
        max_num_tokens, max_num_seqs, max_seq_len: lower the engine's own limits.
        speculative: where drafts of the next tokens come from; tokens stay those of plain decoding.
        early_exit_threshold: decode tokens whose early exit is more probable than this skip the upper layers.
        early_exit_prompts: a prompt's last token may do so too, so that no upper layer is between a prompt and the
            first token of its answer.
        exact_tokens: of an engine with a predictor, what of prompts the model computes itself.
        prefix_dir: a folder for the prefix cache's pages, also those of other engines and servers, of ``prefix_gib``
            GiB (default 16) at most; see docs/prefixes.md.
        prefix_host_gib: main memory for pages that a GPU's memory has no room for.
        async_scheduling: plan each step while the device computes the one before; see docs/cuda.md.

    Raises:
        EngineError: the engine cannot be loaded, a limit is above the engine's, or it cannot
            speculate or plan ahead so.
    """

    def __init__(
        self,
        engine_dir: str | Path | None = None,
        *,
        session: Session | None = None,
        tokenizer: Tokenizer | None = None,
        num_pages: int | None = None,
        num_state_pages: int | None = None,
        num_upper_pages: int | None = None,
        snapshot_every: int | None = None,
        num_snapshots: int | None = None,
        kv_cache_gib: float | None = None,
        enable_prefix_cache: bool = True,
        max_num_tokens: int | None = None,
        max_num_seqs: int | None = None,
        max_seq_len: int | None = None,
        speculative: SpeculativeConfig | None = None,
        early_exit_threshold: float | None = None,
        early_exit_prompts: bool = False,
        exact_tokens: ExactTokens | None = None,
        prefix_dir: str | Path | None = None,
        prefix_gib: float | None = None,
        prefix_host_gib: float | None = None,
        async_scheduling: bool = False,
    ) -> None:
        if session is None:
            if engine_dir is None:
                raise EngineError("no engine was given; pass an engine directory.")
            manifest = load_manifest(engine_dir)
            tokenizer = tokenizer or Tokenizer.from_dir(Path(engine_dir) / TOKENIZER_DIR)
            session = load_session(Path(engine_dir), manifest)
        check_speculation(speculative, early_exit_threshold, session.manifest, early_exit_prompts)
        kept = PrefixOptions(prefix_dir, prefix_gib, prefix_host_gib, snapshot_every, num_snapshots)
        kept.check(session.manifest, enable_prefix_cache)
        if async_scheduling:
            check_async_scheduling(
                session.manifest,
                session.runs_ahead,
                speculative=speculative,
                early_exit_threshold=early_exit_threshold,
                prefix_dir=prefix_dir,
                prefix_host_gib=prefix_host_gib,
            )
        self.manifest = session.manifest
        self.tokenizer = tokenizer
        if num_pages is None and kv_cache_gib is None:
            kv_cache_gib = session.default_kv_cache_gib()
        self.config = resolve_config(
            session.manifest,
            available_memory_bytes(),
            num_pages=num_pages,
            num_state_pages=num_state_pages,
            num_upper_pages=num_upper_pages,
            snapshot_every=snapshot_every,
            num_snapshots=num_snapshots,
            kv_cache_gib=kv_cache_gib,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            enable_prefix_cache=enable_prefix_cache,
            exact_tokens=exact_tokens,
        )
        self.scheduler = Scheduler(self.config)
        self.guides = GuideCompiler(tokenizer, self.config.eos_token_ids, self.config.vocab_size)
        try:
            by_head = speculative is not None and speculative.by_head
            exits = early_exit_threshold, early_exit_prompts
            self.runner = Runner(session, self.config, *exits, by_head, async_scheduling)
        except (RuntimeError, MemoryError) as error:
            sizes = cache_stats(session.manifest, self.scheduler)
            size = (sizes["kv_device_bytes"] + sizes["kv_host_bytes"]) / 2**30
            raise EngineError(f"the KV cache of {size:.3g} GiB cannot be allocated; lower --kv-cache-gib.") from error
        if self.config.kv_policy.keeping.keeps_by_content:
            self.scheduler.transitions.measure = self.runner.measure
        self.prefixes = open_tier(self.scheduler, session.manifest, self.runner.pools, kept)
        self._num_waits = 0
        self._ahead = session if async_scheduling else None
        self._flight: Flight | None = None
        self._close = None if self.prefixes is None else weakref.finalize(self, self.prefixes.close)
        self.requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._deadlines = Deadlines()
        self.statistics = EngineStatistics()
        self.drafting: NoDrafting = NoDrafting()
        if speculative is not None:
            self.drafting = Drafting(speculative, session.manifest, self.config)
        self.verifier = Verifier(session, self.scheduler, self.statistics, self._take)
        self._listener: WorkListener | None = None

    def watch(self, listener: WorkListener) -> None:
        """Tell ``listener`` of each piece of a step's work before it begins."""
        self._listener = listener
        self.runner.watch(listener)
        self.drafting.watch(listener)

    def add_request(
        self, request_id: str, prompt_token_ids: SequenceOf[int], params: SamplingParams, guide: Guide | None = None
    ) -> None:
        """Queue a request; its tokens come from later ``step()`` calls.

        ``guide`` is what ``guides.compile`` made of ``params.guided_decoding``, where that is done already.

        Raises:
            RequestError: it can never be served as asked; nothing of it is kept.
        """
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use", "give another")
        checked = check_request(prompt_token_ids, params, self.config, self.tokenizer)
        if guide is None and params.guided_decoding is not None:
            guide = self.guides.compile(params.guided_decoding)

        request = new_request(request_id, params, checked, next(self._arrivals), self.tokenizer)
        ids, vocab_size = checked.prompt.tolist(), self.config.vocab_size
        sampling = RequestSampling(params, ids, vocab_size, checked.stop_ids, checked.bad_words, guide)
        for sequence in request.sequences:
            sequence.sampling = sampling.state(sequence.index)
        self.requests[request_id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)
            self.scheduler.propose(sequence, tuple(params.draft_token_ids))
        if params.deadline_s is not None:
            self._deadlines.add(request, params.deadline_s, len(self.requests))

    def abort(self, request_id: str) -> bool:
        """Give up a request and free its pages at once, without further output; False if it is not there."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._end(sequence, "abort")
        self._forget(request)
        return True

    def step(self) -> list[SequenceOutput]:
        """Run one step: plan it, compute it, sample from it, and report each sequence that has something new.

        An error in the computation finishes the sequences of that step with reason "error" and leaves the
        engine able to serve the others; so does, for a single sequence, a token that cannot be chosen.

        With asynchronous scheduling the step is launched, and what is reported is the step before.
        """
        outputs = self._expire()
        self.drafting.propose(self.scheduler)
        flight = self._flight
        if flight is not None:
            flight.assume(self.scheduler)
        plan = self.scheduler.schedule()
        self.drafting.planned(plan, self.scheduler)
        if not plan:
            outputs += self._land(plan)
            self._wait_for_pages(outputs)
            return outputs
        self.statistics.planned(plan)
        self.guides.begin_step()
        with step_threads(self.manifest.num_parameters, plan.num_tokens):
            try:
                self.runner.change(plan)
                start = time.perf_counter()
                logits = self.runner.run(plan, self.scheduler.slots, flight)
                self._measure(plan, time.perf_counter() - start)
            except BaseException as error:
                let_end(error)
                return outputs + self._land(plan) + self._failed(error, plan)
            try:
                if self._ahead is not None:
                    survivors = plan.survivors
                    outputs += self._land(plan)
                    logits, self._flight = leave(plan, logits, survivors, self._ahead, self.config.vocab_size)
                sampled = None if logits is None else self._sample(plan, logits)
            except BaseException as error:
                return outputs + self._failed(error, plan)
        if self._flight is not None:
            return outputs
        if logits is None or sampled is None:
            self.scheduler.commit(plan)
            return outputs
        return outputs + self._report(plan, logits, sampled)

    def _wait_for_pages(self, outputs: list[SequenceOutput]) -> None:
        """Sleep a little where all that is left to do is read from --prefix-dir."""
        if self.prefixes is not None and self.scheduler.fetches.is_waiting and not outputs:
            self._num_waits += 1
            self.prefixes.wait(PAGES_S)

    def _measure(self, plan: Schedule, seconds: float) -> None:
        """Note what computing prompts takes, where reading them may be cheaper."""
        if self.prefixes is not None:
            num_pages = sum(count for _, count in plan.prefills) / self.config.page_size
            if num_pages >= 1:
                self.prefixes.rates.computed(num_pages, seconds)

    def _sample(self, plan: Schedule, logits: torch.Tensor) -> SampledTokens:
        """Choose the first new token of each survivor."""
        self.guides.begin_sampling()
        if self._listener is not None:
            self._listener(Work("sample", len(logits)))
        survivors = plan.survivors
        sampled = self.verifier.sample(plan, logits, self.drafting.probs) if plan.drafts else sample(logits, survivors)
        note_scores(survivors, sampled)
        return sampled

    def _land(self, plan: Schedule) -> list[SequenceOutput]:
        """Wait for the step in flight and give its survivors their tokens. If it failed, so did ``plan``, which was
        planned on what it should have left."""
        flight = self._flight
        if flight is None:
            return []
        try:
            survivors, sampled = flight.land(self.scheduler)
        except BaseException as error:
            let_end(error)
            self._flight = None
            self.scheduler.withdraw()
            for sequence in flight.plan.affected:
                self.scheduler.unpublish(sequence)
            return self._failed(error, flight.plan, plan)
        self._flight = None
        note_scores(survivors, sampled)
        for row in sampled.errors:
            self.scheduler.unpublish(survivors[row])
        outputs: dict[Sequence, SequenceOutput] = {}
        self._take(survivors, sampled, outputs)
        self.statistics.generated(outputs)
        return list(outputs.values())

    def _failed(self, error: BaseException, *plans: Schedule) -> list[SequenceOutput]:
        let_end(error)
        logger.error("a step failed", exc_info=error)
        self.statistics.num_failed_steps += 1
        affected = dict.fromkeys(sequence for plan in plans for sequence in plan.affected)
        open_ones = [sequence for sequence in affected if sequence.status is not Status.FINISHED]
        return [self._finish(sequence, "error", refusal_of(error)) for sequence in open_ones]

    def _report(self, plan: Schedule, logits: torch.Tensor, sampled: SampledTokens) -> list[SequenceOutput]:
        """Give the survivors their tokens and those that follow right drafts."""
        survivors, outputs = plan.survivors, dict[Sequence, SequenceOutput]()
        for row in sampled.errors:
            # Out of the plan first, so that its pages are not offered to other prompts.
            plan.drop(survivors[row])
        self.scheduler.commit(plan)
        self._take(survivors, sampled, outputs)
        if plan.drafts:
            self.verifier.verify(plan, logits, outputs)
        for sequence in (*plan.drafts, *plan.draft_limits):
            if sequence.status is Status.RUNNING:
                self.scheduler.roll_back(sequence)
        self.statistics.generated(outputs)
        self.drafting.observe(plan, outputs)
        return list(outputs.values())

    def has_unfinished(self) -> bool:
        """Requests are waiting or running."""
        return bool(self.requests)

    @property
    def num_iterations(self) -> int:
        """Steps since the engine was loaded, those included that waited for pages to be read."""
        return self.statistics.num_iterations + self._num_waits

    def stats(self) -> dict[str, Any]:
        """Return gauges of sequences and pages, and what ``EngineStatistics`` counts since the engine was loaded.

        ``num_prefilling`` of the running sequences still compute their prompt (again, after a preemption), the
        others are ``num_decoding``. ``num_paused`` of the waiting ones were preempted. The last step had
        ``num_context_tokens`` tokens of prompts. With a draft model there are its gauges too, ``draft_model_…`` (see
        ``DraftModel.stats``), with suffix decoding ``suffix_num_tokens``, and with a KV policy that counts something
        ``num_…`` of its ``counters``.
        """
        scheduler, pool = self.scheduler, self.scheduler.pool
        num_prefilling = sum(s.num_computed < s.num_prompt_tokens for s in scheduler.running)
        return {
            "num_waiting": len(scheduler.waiting),
            "num_paused": sum(s.metrics.num_preemptions > 0 for s in scheduler.waiting),
            "num_running": len(scheduler.running),
            "num_prefilling": num_prefilling,
            "num_decoding": len(scheduler.running) - num_prefilling,
            "max_num_seqs": self.config.max_num_seqs,
            "num_pages": pool.num_pages,
            "num_used_pages": pool.num_used,
            "num_free_pages": pool.num_available,
            "num_cached_pages": len(pool.cached_pages),
            "page_size": self.config.page_size,
            "page_bytes": self.manifest.page_bytes,
            "num_upper_calls": self.runner.num_upper_calls,
            "num_early_exits": self.runner.num_early_exits,
            "num_prompt_early_exits": self.runner.num_prompt_early_exits,
            "num_preemptions": scheduler.num_preemptions,
            "num_reused_tokens": scheduler.admissions.num_reused_tokens,
            **self._tier_stats(),
            **cache_stats(self.manifest, scheduler),
            **{f"num_{name}": count for name, count in self.runner.policy_counters.items()},
            **self.drafting.stats(),
            **self.statistics.counters(),
            "histograms": self.statistics.histograms(),
        }

    def _tier_stats(self) -> dict[str, float]:
        if self.prefixes is None:
            return {}
        return {"num_stored_reused_tokens": self.scheduler.fetches.num_tokens, **self.prefixes.stats()}

    def close(self) -> None:
        """Write what --prefix-dir still lacks, for at most 1.5 seconds, and end its threads. Idempotent, and done when
        the engine is forgotten or the program ends."""
        if self._close is not None:
            self._close()

    def check_invariants(self) -> None:
        """Raise AssertionError unless pages, holders, slots and queues agree (see ``invariants``)."""
        check_invariants(self.scheduler, None if self._flight is None else self._flight.plan)

    def _take(self, sequences: list[Sequence], sampled: SampledTokens, outputs: dict[Sequence, SequenceOutput]) -> None:
        """Give each sequence its token, or end it for having none, and say so in ``outputs``."""
        tokens, logprobs, logits, errors = sampled.tokens, sampled.logprobs, sampled.logits, sampled.errors
        rows: SequenceOf[int] = range(len(sequences))
        if errors:
            rows = [row for row in rows if row not in errors]
            self.scheduler.append([sequences[row] for row in rows], [tokens[row] for row in rows])
        else:
            self.scheduler.append(sequences, tokens)
        for row, refusal in errors.items():
            logger.error("request %s: %s", sequences[row].request_id, refusal)
            outputs[sequences[row]] = self._finish(sequences[row], "error", refusal, outputs.get(sequences[row]))
        for row in rows:
            sequence, token = sequences[row], tokens[row]
            output = outputs.get(sequence)
            if output is None:
                output = SequenceOutput(sequence.request_id, sequence.index, [token], metrics=sequence.metrics)
                outputs[sequence] = output
            else:
                output.new_token_ids.append(token)
            if sequence.num_generated == 1:
                output.prompt_scores = sequence.prompt_scores
            if row in logprobs:
                output.logprobs = [*(output.logprobs or ()), logprobs[row]]
            if row in logits:
                output.logits = [*(output.logits or ()), logits[row]]
            if sequence.stopper is None and token not in sequence.stop_ids and sequence.length < sequence.max_length:
                continue
            detail: StopReason | Refusal
            try:
                reason, detail = end_of(sequence, token, self.config.eos_token_ids)
            except RequestError as error:
                reason, detail = "error", error.refusal
            except BaseException as error:
                let_end(error)
                logger.exception("looking for a stop string failed")
                reason, detail = "error", refusal_of(error)
            if reason:
                self._finish(sequence, reason, detail, output)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        detail: StopReason | Refusal,
        output: SequenceOutput | None = None,
    ) -> SequenceOutput:
        self._end(sequence, reason)
        request = self.requests[sequence.request_id]
        if request.finished:
            self._forget(request)
        output = output or SequenceOutput(sequence.request_id, sequence.index, [], metrics=request.metrics)
        output.finished, output.finish_reason = True, reason
        if isinstance(detail, Refusal):
            output.refusal, detail = detail, detail.words
        output.stop_reason = detail
        return output

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        self.statistics.sequence_ended(sequence, reason)
        self.drafting.forget(sequence)

    def _forget(self, request: Request) -> None:
        self.statistics.request_ended(request, time.monotonic_ns())
        del self.requests[request.request_id]

    def _expire(self) -> list[SequenceOutput]:
        return [
            self._finish(sequence, "abort", "deadline")
            for request in self._deadlines.pop_passed()
            for sequence in request.sequences
            if sequence.status is not Status.FINISHED
        ]
