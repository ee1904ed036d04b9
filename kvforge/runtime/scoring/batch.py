"""Steps of scoring: which tokens of which requests are computed next, in which pages."""

from collections import deque
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from kvforge.common.errors import RequestError
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.request_check import checked_prompt
from kvforge.runtime.requests.checks import longer_sequences
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.sessions.inputs import LowerStep
from kvforge.runtime.step.batch import StepBatch
from kvforge.runtime.step.past_cut import ComputedChunk, past_cut

_PARAMS = SamplingParams()


class ScoredSequence:
    """A request being scored: a sequence of all tokens but the last, whose distribution nobody asks for."""

    def __init__(self, engine: LLMEngine, index: int, context: SequenceOf[int], continuation: SequenceOf[int]) -> None:
        config, total = engine.config, len(context) + len(continuation)
        if total > config.max_seq_len:
            raise RequestError(
                f"request {index} has {len(context)} context and {len(continuation)} continuation tokens, but the "
                f"engine takes at most {config.max_seq_len} together",
                "shorten it",
                operator=longer_sequences(config.max_seq_len),
            )
        if -(-(total - 1) // config.page_size) > config.num_pages:
            raise RequestError(
                f"request {index} has {total} tokens, but the KV cache holds {config.num_pages * config.page_size}",
                operator="raise the KV cache size",
            )
        ids = np.concatenate([checked_prompt(context, config), checked_prompt(continuation, config)])
        metrics = RequestMetrics(0, 0)
        self.index = index
        self.num_context = len(context)
        self.continuation = torch.from_numpy(ids[len(context) :].astype(np.int64))
        self.sequence = Sequence(f"score-{index}", 0, (0, index, 0), ids[:-1], _PARAMS, total - 1, metrics)
        self.sequence.num_prompt_tokens = len(context)  # of which a blind cut hides some
        num_upper = engine.scheduler.upper_pages.pages_for(self.sequence, total - 1)
        if num_upper > config.num_upper_pages:
            raise RequestError(
                f"request {index} needs {num_upper} pages above the model's cut, but the engine has "
                f"{config.num_upper_pages}",
                operator="raise the KV cache size",
            )

    @property
    def num_left(self) -> int:
        """Tokens still to be computed."""
        return self.sequence.length - self.sequence.num_computed

    @property
    def num_below(self) -> int:
        """Of them, those of the context that need no logits."""
        return max(self.num_context - 1 - self.sequence.num_computed, 0)

    def num_survivors(self, count: int) -> int:
        """How many of the next ``count`` tokens need logits: a suffix of them."""
        return max(count - self.num_below, 0)

    def advance(self, engine: LLMEngine, count: int) -> int:
        """Record that ``count`` tokens are computed; returns how many of the continuation are scored now."""
        rows, sequence = engine.scheduler.state_rows, self.sequence
        num_drafts = len(rows.drafts.get(sequence, ()))
        self._advance(engine, count - num_drafts)
        rows.commit([sequence])
        for _ in range(num_drafts):
            self._advance(engine, 1)
            rows.accept([sequence])
        rows.trim(sequence)
        return self.sequence.num_computed - self.num_context + 1

    def _advance(self, engine: LLMEngine, count: int) -> None:
        self.sequence.num_computed += count
        engine.scheduler.exact_pages.trim(self.sequence)
        if engine.config.enable_prefix_cache:
            engine.scheduler.prefix_cache.publish(self.sequence)

    def waits_for(self, other: "ScoredSequence", page_size: int) -> bool:
        """Both contexts begin with the same whole pages, and ``other`` is still computing them."""
        both = min(self.num_context, other.num_context) - 1
        if other.num_below == 0 or both < page_size:
            return False
        same = np.append(self.sequence.tokens[:both] == other.sequence.tokens[:both], False)
        return int(same.argmin()) // page_size > other.sequence.num_computed // page_size

    def place(self, engine: LLMEngine) -> bool:
        """Take pages for all tokens, those of a known beginning of the context included, and a slot where there are
        exact pages or rows of states, which are enough for as many sequences; False if there are none."""
        pool, cache, sequence = engine.scheduler.pool, engine.scheduler.prefix_cache, self.sequence
        upper, rows = engine.scheduler.upper_pages, engine.scheduler.state_rows
        page_size, free_slots = engine.config.page_size, engine.scheduler.slots.free_slots
        takes_slot = engine.scheduler.exact_pages.is_used or rows.is_used
        if takes_slot and not free_slots:
            return False
        known = cache.lookup(sequence) if engine.config.enable_prefix_cache else []
        reused = known[: (self.num_context - 1) // page_size]
        reused = reused[: rows.reach(reused)]
        for page in reused:
            pool.share(page)
            sequence.pages.append(page)
        sequence.upper_pages = upper.share(reused)
        needed = -(-sequence.length // page_size) - len(reused)
        needed_above = upper.pages_for(sequence, sequence.length) - len(sequence.upper_pages)
        if needed > pool.num_available or needed_above > upper.pool.num_available:
            self.release(engine)
            return False
        sequence.num_computed = len(reused) * page_size
        if takes_slot:
            sequence.slot = free_slots.pop()
            rows.take(sequence)
        for _ in range(needed):
            new_page = pool.allocate()
            assert new_page is not None  # there were enough
            sequence.pages.append(new_page)
        return upper.extend(sequence, sequence.length)

    def release(self, engine: LLMEngine) -> None:
        """Let go of all pages."""
        engine.scheduler.exact_pages.give_back(self.sequence)
        engine.scheduler.state_rows.give_back(self.sequence)
        if self.sequence.slot >= 0:
            engine.scheduler.slots.free_slots.append(self.sequence.slot)
            self.sequence.slot = -1
        for page in reversed(self.sequence.pages):
            engine.scheduler.pool.release(page, keep=engine.scheduler.prefix_cache.holds(page))
        self.sequence.pages = []
        engine.scheduler.upper_pages.give_back(self.sequence)


def plan_step(
    engine: LLMEngine, pending: deque[ScoredSequence], active: list[ScoredSequence], max_survivors: int | None
) -> list[tuple[ScoredSequence, int]]:
    """Return the next step's requests and how many tokens of each, at least one; moves requests to ``active``.

    A request waits while another computes the beginning of both contexts, to share it.
    """
    config = engine.config
    tokens = config.max_num_tokens
    survivors = min(tokens, engine.manifest.max_num_survivors, max_survivors or tokens)
    chunks: list[tuple[ScoredSequence, int]] = []

    def take(scored: ScoredSequence) -> None:
        nonlocal tokens, survivors
        count = min(tokens, scored.num_left, scored.num_below + survivors)
        if config.reads_states and count > scored.num_below:  # one row for each survivor, and one for each free slot
            rows, num_slots = engine.scheduler.state_rows, len(engine.scheduler.slots.free_slots)
            count = min(count, scored.num_below + 1 + len(rows.free_rows) - num_slots)
            rows.take_drafts(scored.sequence, count - scored.num_below - 1)
        if count:
            tokens, survivors = tokens - count, survivors - scored.num_survivors(count)
            chunks.append((scored, count))

    for scored in active:
        take(scored)
    while pending and tokens and survivors and len(active) < config.max_num_seqs:
        shared = config.enable_prefix_cache and any(pending[0].waits_for(other, config.page_size) for other in active)
        if shared or not pending[0].place(engine):
            break
        active.append(pending[0])  # in one of the two queues at any time, whatever interrupts
        take(pending.popleft())
    if not chunks:
        raise RequestError("the engine's pages are in use by unfinished requests", "score when they have finished")
    return chunks


def build_batch(engine: LLMEngine, chunks: list[tuple[ScoredSequence, int]]) -> StepBatch:
    page_size = engine.config.page_size
    ends = [scored.sequence.num_computed + count for scored, count in chunks]
    table = np.zeros((len(chunks), -(-max(ends) // page_size)), dtype=np.int32)
    exact, exact_rows = engine.scheduler.exact_pages, np.zeros_like(table)
    ids, positions, slots, survivors, starts, survivor_starts = [], [], [], [], [0], [0]
    for row, ((scored, count), end) in enumerate(zip(chunks, ends, strict=True)):
        pages = scored.sequence.pages[: table.shape[1]]
        table[row, : len(pages)] = pages
        place = np.arange(end - count, end, dtype=np.int32)
        written = table[row]
        if exact.is_used:
            exact.cover(scored.sequence, end)
            exact_rows[row] = written = engine.scheduler.slots.write_table[scored.sequence.slot, : table.shape[1]]
        ids.append(scored.sequence.tokens[end - count : end])
        positions.append(place)
        slots.append(written[place // page_size] * page_size + place % page_size)
        starts.append(starts[-1] + count)
        kept = scored.num_survivors(count)
        survivors.append(np.arange(starts[-1] - kept, starts[-1], dtype=np.int32))
        survivor_starts.append(survivor_starts[-1] + kept)
    step = LowerStep(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        positions=torch.from_numpy(np.concatenate(positions)),
        slot_mapping=torch.from_numpy(np.concatenate(slots)),
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_length=torch.tensor(ends, dtype=torch.int32),
        page_table=torch.from_numpy(table),
        state=(torch.from_numpy(exact_rows),) if exact.is_used else (),
        rows=_state_rows(engine, chunks) if engine.scheduler.state_rows.is_used else (),
    )
    if (visibility := engine.config.visibility) is not None:
        parts = [_past_cut_of(scored, count) for scored, count in chunks]
        above = past_cut(parts, visibility, page_size)
        return StepBatch(step, above.survivor_index, above.survivor_start, past_cut=above)
    return StepBatch(
        step,
        survivor_index=torch.from_numpy(np.concatenate(survivors)),
        survivor_start=torch.tensor(survivor_starts, dtype=torch.int32),
        reads_states=engine.config.reads_states,
    )


def _state_rows(engine: LLMEngine, chunks: list[tuple[ScoredSequence, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, slots = engine.scheduler.state_rows, engine.scheduler.slots
    written: list[np.ndarray] = []
    for scored, count in chunks:
        states = np.full(count, -1, dtype=np.int32)
        num_tokens = count - len(rows.drafts.get(scored.sequence, ()))
        for place, row in rows.plan_tokens(scored.sequence, num_tokens).items():
            states[place] = row
        states[num_tokens - 1] = slots.state_write[scored.sequence.slot]
        written.append(states)
    read = slots.state_read[[scored.sequence.slot for scored, _ in chunks]]
    return torch.from_numpy(read), torch.from_numpy(np.concatenate(written))


def _past_cut_of(scored: ScoredSequence, count: int) -> ComputedChunk:
    start = scored.sequence.num_computed
    pages, num_asked = scored.sequence.upper_pages, scored.num_survivors(count)
    return ComputedChunk(scored.num_context, start, start + count, pages, num_asked)
