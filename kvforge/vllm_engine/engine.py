"""vLLM's engine behind the interface of ``kvforge.runtime.LLMEngine``; runs under the interpreter that has vLLM.

Each sequence of a request is a request of vLLM's. vLLM schedules, computes and samples; what ends a sequence, and what
is counted, is decided here by the code that our own engine uses.
"""

import itertools
import logging
import time
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError, RequestError, first_line
from kvforge.manifest import TOKENIZER_DIR, Manifest, load_manifest
from kvforge.runtime.admission import check_request, new_request
from kvforge.runtime.config import MAX_CACHE_TOKENS, RuntimeConfig, resolve_config
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.runtime.requests.outputs import SequenceOutput, TokenLogprobs
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import FinishReason, Request, Sequence, Status
from kvforge.runtime.scheduling.deadlines import Deadlines
from kvforge.runtime.statistics.counters import EngineStatistics
from kvforge.runtime.step.work import Work, WorkListener
from kvforge.runtime.text.stop import StopReason, end_of
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.vllm_engine.params import check_honoured, guide_fields, vllm_fields
from kvforge.vllm_engine.vllm_core import VllmCore, load_core

logger = logging.getLogger(__name__)

NOT_OF_VLLM = (
    "num_cached_pages", "num_early_exits", "num_prompt_early_exits", "kv_host_bytes", "kv_host_used_bytes",
    "num_state_pages", "num_used_state_pages", "num_upper_pages", "num_used_upper_pages", "num_compacted",
    "num_transitions",
)  # fmt: skip
"""Statistics of what vLLM does not have, or does not say."""


class PassedGuides:
    """Guides as they are given: vLLM compiles them itself, beside its steps."""

    def prepare(self) -> None:
        """Nothing has to be ready."""

    def known(self, guided: GuidedDecoding) -> GuidedDecoding:
        """Return the guide."""
        return guided

    def compile(self, guided: GuidedDecoding, verdict: Any = None) -> GuidedDecoding:
        """Return the guide; raises RequestError where its verdict refuses it."""
        if verdict is not None:
            verdict.accepted()
        return guided


class VllmEngine:
    """Serves many requests at once on vLLM's engine ``core``. Not thread-safe: call it from one thread."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer | None, config: RuntimeConfig, core: VllmCore) -> None:
        self.manifest, self.tokenizer, self.config, self._core = manifest, tokenizer, config, core
        self.guides = PassedGuides()
        added = {} if tokenizer is None else tokenizer.backend.get_added_tokens_decoder()
        self._special_texts = frozenset(token.content for token in added.values() if token.special)
        self.requests: dict[str, Request] = {}
        self.statistics = EngineStatistics()
        self._sequences: dict[str, Sequence] = {}
        self._reused: dict[Sequence, int] = {}
        self._pages: dict[Sequence, int] = {}
        self._num_reused_tokens = self._num_preemptions = 0
        self._arrivals = itertools.count()
        self._names = itertools.count()
        self._deadlines = Deadlines()
        self._listener: WorkListener | None = None

    def watch(self, listener: WorkListener) -> None:
        """Tell ``listener`` of each step before it begins."""
        self._listener = listener

    def has_unfinished(self) -> bool:
        """Requests are waiting or running."""
        return bool(self.requests)

    @property
    def num_iterations(self) -> int:
        """Steps since the engine was loaded."""
        return self.statistics.num_iterations

    def add_request(
        self, request_id: str, prompt_token_ids: SequenceOf[int], params: SamplingParams, guide: Any = None
    ) -> None:
        """Queue a request; its tokens come from later ``step()`` calls. ``guide`` is that of ``params``.

        Raises:
            RequestError: it can never be served as asked, or asks for what vLLM does not have; nothing of it is kept.
        """
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use", "give another")
        check_honoured(params)
        checked = check_request(prompt_token_ids, params, self.config, self.tokenizer)
        guide_of_vllm = None
        if params.guided_decoding is not None:
            guide_of_vllm = guide_fields(params.guided_decoding, self._special_texts)

        request = new_request(request_id, params, checked, next(self._arrivals), self.tokenizer)
        ids = checked.prompt.tolist()
        room = checked.max_length - len(ids)
        try:
            for sequence in request.sequences:
                sequence.sampling = name = f"{next(self._names)}"
                fields = vllm_fields(params, room, checked.stop_ids, checked.bad_words, sequence.index)
                self._core.add(name, ids, fields, guide_of_vllm, params.priority)
                self._sequences[name] = sequence
        except ValueError as error:  # vLLM's errors of requests are its subclasses
            for sequence in request.sequences:
                self._drop(sequence)
            raise RequestError(f"vLLM refuses the request: {first_line(error)}") from None
        self.requests[request_id] = request
        if params.deadline_s is not None:
            self._deadlines.add(request, params.deadline_s, len(self.requests))

    def abort(self, request_id: str) -> bool:
        """Give up a request and free its pages at once, without further output; False if it is not there."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._drop(sequence)
                self._end(sequence, "abort")
        self._forget(request)
        return True

    def step(self) -> list[SequenceOutput]:
        """Run one step of vLLM's and report each sequence that has something new.

        An error in the computation is not caught: vLLM's engine does not go on after one.
        """
        outputs = [
            self._cut_off(sequence, "abort", "deadline")
            for request in self._deadlines.pop_passed()
            for sequence in request.sequences
            if sequence.status is not Status.FINISHED
        ]
        if not self.requests:
            return outputs
        if self._listener is not None:
            prefills = any(sequence.num_generated == 0 for sequence in self._sequences.values())
            units = self.config.max_num_tokens if prefills else len(self._sequences)
            self._listener(Work("prefill" if prefills else "decode", units, (units.bit_length(), *self._features())))
        self.statistics.num_iterations += 1
        stepped = self._core.step()
        self._count_prompt_tokens()
        grown: dict[Sequence, SequenceOutput] = {}
        for output in stepped:
            sequence = self._sequences.get(output.request_id)
            if sequence is not None:
                grown[sequence] = self._take(sequence, output)
        self.statistics.generated(grown)
        for sequence, of_sequence in grown.items():
            if of_sequence.finished:
                self._end(sequence, of_sequence.finish_reason or "stop")
                self._forget_if_finished(sequence)
        return outputs + list(grown.values())

    def stats(self) -> dict[str, Any]:
        """Return what ``LLMEngine.stats`` does; pages are vLLM's blocks."""
        state = self._core.state()
        used = state.num_pages - state.num_free_pages
        page_bytes = state.cache_bytes // max(state.num_pages, 1)
        prefilling = sum(computed < s.num_prompt_tokens for s, computed in self._running(state.computed))
        return {
            "num_waiting": state.num_waiting,
            "num_paused": state.num_preempted,
            "num_running": len(state.computed),
            "num_prefilling": prefilling,
            "num_decoding": len(state.computed) - prefilling,
            "max_num_seqs": self.config.max_num_seqs,
            "num_pages": state.num_pages,
            "num_used_pages": used,
            "num_free_pages": state.num_free_pages,
            "page_size": self.config.page_size,
            "page_bytes": page_bytes,
            "num_upper_calls": self.statistics.num_iterations,
            "num_preemptions": self._num_preemptions,
            "num_reused_tokens": self._num_reused_tokens,
            "kv_device_bytes": state.cache_bytes,
            "kv_device_used_bytes": used * page_bytes,
            **dict.fromkeys(NOT_OF_VLLM, 0),
            **self.statistics.counters(),
            "histograms": self.statistics.histograms(),
        }

    def warm_up(self) -> None:
        """Have vLLM compile now what it compiles for the first request that is sampled, or wants log-probabilities."""
        params = SamplingParams(max_tokens=2, top_k=5, top_p=0.9, repetition_penalty=1.1, logprobs=1, seed=0)
        self.add_request("warm-up", [0], params)
        while self.has_unfinished():
            self.step()
        self.statistics = EngineStatistics()

    def _features(self) -> tuple[int, ...]:
        """Which parts of vLLM's sampler the next step may be the first to use."""
        asked = [sequence.params for sequence in self._sequences.values()]
        return (
            int(any(not params.greedy for params in asked)),
            int(any(params.logprobs is not None for params in asked)),
            int(any(params.guided_decoding is not None for params in asked)),
        )

    def _take(self, sequence: Sequence, output: Any) -> SequenceOutput:
        """What a step gave a sequence; its tokens are taken until one of them ends it."""
        completion = output.outputs[0]
        tokens: list[int] = []
        reason, detail = None, None
        self._note_start(sequence, output)
        for token in completion.token_ids:
            sequence.append(token)
            tokens.append(token)
            reason, detail = end_of(sequence, token, self.config.eos_token_ids)
            if reason is not None:
                break
        self._count_pages(sequence)
        logprobs = None
        if sequence.params.logprobs is not None and completion.logprobs is not None:
            entries = list(completion.logprobs)[: len(tokens)]
            logprobs = [_logprobs(t, entry, sequence.params.logprobs) for t, entry in zip(tokens, entries, strict=True)]
        if reason is not None and not output.finished:
            self._drop(sequence)
        elif output.finished:
            if reason is None:  # for what is no affair of ours: its guide ended, or vLLM gave it up
                reason = "error" if completion.finish_reason not in ("stop", "length") else completion.finish_reason
                detail = f"vLLM ended it ({completion.finish_reason})" if reason == "error" else None
            self._sequences.pop(sequence.sampling, None)
        return SequenceOutput(
            sequence.request_id,
            sequence.index,
            tokens,
            logprobs,
            reason is not None,
            reason,
            detail,
            sequence.metrics,
        )

    def _note_start(self, sequence: Sequence, output: Any) -> None:
        """At the first tokens of a sequence: when it was scheduled, and what it found in the prefix cache."""
        metrics = sequence.metrics
        if sequence in self._reused:
            return
        reused = output.num_cached_tokens or 0
        self._reused[sequence] = reused
        self._num_reused_tokens += reused
        metrics.num_reused_pages += reused // self.config.page_size
        times = output.metrics
        if metrics.first_scheduled_time_ns == 0 and times is not None:
            queued_ns = max(int((times.scheduled_ts - times.queued_ts) * 1e9), 0)
            metrics.first_scheduled_time_ns = metrics.arrival_time_ns + queued_ns
            metrics.first_scheduled_monotonic_ns = metrics.arrival_monotonic_ns + queued_ns
            self.statistics.queue_s.observe(queued_ns / 1e9)

    def _count_pages(self, sequence: Sequence) -> None:
        """Pages that were given to a sequence, by its length: all but those of the prefix cache."""
        pages = -(-(sequence.length - 1) // self.config.page_size) - self._reused[sequence] // self.config.page_size
        new = pages - self._pages.get(sequence, 0)
        self._pages[sequence] = pages
        sequence.metrics.num_allocated_pages += new
        sequence.metrics.num_new_pages += new

    def _count_prompt_tokens(self) -> None:
        """Of the last step, by how far vLLM's scheduler has come."""
        state = self._core.state()
        self.statistics.num_context_tokens = 0
        for sequence, computed in self._running(state.computed):
            done = min(computed, sequence.num_prompt_tokens)
            self.statistics.num_context_tokens += max(done - sequence.num_computed, 0)
            sequence.num_computed = max(done, sequence.num_computed)

    def _running(self, computed: dict[str, int]) -> list[tuple[Sequence, int]]:
        found = ((self._sequences.get(name), number) for name, number in computed.items())
        return [(sequence, number) for sequence, number in found if sequence is not None]

    def _cut_off(self, sequence: Sequence, reason: FinishReason, detail: StopReason) -> SequenceOutput:
        """End a sequence between two steps."""
        self._drop(sequence)
        self._end(sequence, reason)
        self._forget_if_finished(sequence)
        return SequenceOutput(sequence.request_id, sequence.index, [], None, True, reason, detail, sequence.metrics)

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence from vLLM, which frees its pages."""
        name = sequence.sampling
        if self._sequences.pop(name, None) is not None:
            self._core.abort(name)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.status = Status.FINISHED
        self._reused.pop(sequence, None)
        self._pages.pop(sequence, None)
        self.statistics.sequence_ended(sequence, reason)

    def _forget_if_finished(self, sequence: Sequence) -> None:
        request = self.requests.get(sequence.request_id)
        if request is not None and request.finished:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self.statistics.request_ended(request, time.monotonic_ns())
        del self.requests[request.request_id]


def _logprobs(token: int, entry: Any, count: int) -> TokenLogprobs:
    """vLLM's ``{token id: Logprob}`` of one token; it has the chosen one besides the most probable ones."""
    by_rank = sorted(entry.items(), key=lambda item: item[1].rank)
    top = {int(other): float(value.logprob) for other, value in by_rank if value.rank <= count}
    chosen = entry[token]
    return TokenLogprobs(token, float(chosen.logprob), int(chosen.rank), top)


def load_engine(
    engine_dir: str | Path,
    *,
    kv_cache_gib: float | None = None,
    enable_prefix_cache: bool = True,
    max_num_seqs: int | None = None,
    max_num_tokens: int | None = None,
    max_seq_len: int | None = None,
    speculative: Any = None,
    early_exit_threshold: float | None = None,
    early_exit_prompts: bool = False,
    exact_tokens: Any = None,
) -> VllmEngine:
    """Load an engine of target ``vllm``.

    Raises:
        EngineError: it is none or damaged, a limit is above the engine's, its checkpoint is not there, vLLM does not
            take it, or drafts are asked for, which ``--engine-args`` says in vLLM's own words.
    """
    if speculative is not None or early_exit_threshold is not None or early_exit_prompts:
        raise EngineError(
            "drafts and early exits of kvforge's own are not there with target vllm; leave them out, or build it with "
            "vLLM's speculative_config in --engine-args."
        )
    if exact_tokens is not None:
        raise EngineError("exact tokens are for engines that predict the cache; leave them out with target vllm.")
    manifest = load_manifest(engine_dir)
    limits = partial(
        resolve_config,
        manifest,
        0,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        enable_prefix_cache=enable_prefix_cache,
    )
    wanted = limits(num_pages=MAX_CACHE_TOKENS // manifest.page_size, kv_cache_gib=kv_cache_gib)
    tokenizer = Tokenizer.from_dir(Path(engine_dir) / TOKENIZER_DIR)
    core = load_core(Path(engine_dir), manifest, wanted, kv_cache_gib)
    engine = VllmEngine(manifest, tokenizer, limits(num_pages=core.num_pages), core)
    engine.warm_up()
    return engine
