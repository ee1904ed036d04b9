"""The runtime's limits, resolved once from the engine's manifest and the machine's memory."""

import math
from dataclasses import dataclass, field

from kvforge.common.errors import EngineError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.kv_policies import Full, KVPolicy
from kvforge.kv_policies.visibility import Visibility, visibility_of
from kvforge.manifest import Manifest
from kvforge.runtime.cache_capacity import CacheShape, cache_shape
from kvforge.runtime.state_capacity import bytes_for_all, count_states, rows_per_sequence

DEFAULT_KV_CACHE_BYTES = 4 << 30
DEFAULT_FRACTION = 0.25
LARGEST_DEFAULT_FRACTION = 0.8
MAX_CACHE_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class RuntimeConfig:
    """Limits of one engine in one process; counts of pages, sequences and tokens.

    ``max_num_seqs`` is never above what can be in one step: each sequence has a token and a page there.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    enable_prefix_cache: bool
    max_num_survivors: int
    """Tokens of one step that can go past the cut."""
    kv_policy: KVPolicy = field(default_factory=Full)
    has_observers: bool = False
    """See ``Observing``; False without a cut, where all tokens go through all layers."""
    num_state_pages: int = 0
    """Pages of what the policy keeps of sequences besides K,V."""
    num_exact_pages: int = 0
    """Pages that K and V are written to where the policy seals them."""
    visibility: Visibility | None = None
    """Which tokens go past a blind cut; None with any other."""
    num_upper_pages: int = 0
    """Pages of the owners above a blind cut."""
    num_state_rows: int = 0
    """States of running sequences, where layers keep a state, those behind drafts included; 0 elsewhere."""
    num_snapshots: int = 0
    """States kept at the ends of pages, for prompts that begin alike."""
    reads_states: bool = False
    """Whether layers above a cut keep a state, and read the states behind the tokens that go past it."""
    snapshot_every: int = 0
    """Of how many pages of a sequence one has such a state; 0 without snapshots."""
    exact_tokens: ExactTokens | None = None
    """Of prompts that an auxiliary model predicts, what the model computes itself; None where it computes all."""

    @property
    def max_pages_per_seq(self) -> int:
        """Pages of a sequence of ``max_seq_len`` tokens."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def max_state_pages_per_seq(self) -> int:
        """State pages of a sequence, at least 1."""
        return max(self.kv_policy.keeping.num_state_pages(self.max_seq_len, self.page_size), 1)

    def pages_needed(self, num_prompt_tokens: int, length: int) -> tuple[int, int]:
        """Return the K,V pages that a sequence of ``length`` computed tokens takes at its largest, and state pages."""
        policy = self.kv_policy
        num_cached = policy.max_cached(num_prompt_tokens, length)
        return -(-num_cached // self.page_size), policy.keeping.num_state_pages(num_prompt_tokens, self.page_size)


def resolve_config(
    manifest: Manifest,
    available_bytes: int,
    *,
    num_pages: int | None = None,
    num_state_pages: int | None = None,
    num_upper_pages: int | None = None,
    num_snapshots: int | None = None,
    snapshot_every: int | None = None,
    kv_cache_gib: float | None = None,
    max_num_seqs: int | None = None,
    max_num_tokens: int | None = None,
    max_seq_len: int | None = None,
    enable_prefix_cache: bool = True,
    exact_tokens: ExactTokens | None = None,
) -> RuntimeConfig:
    """Fill in what the caller left open.

    The pool holds ``max_num_seqs`` sequences of ``max_seq_len`` tokens unless that exceeds ``kv_cache_gib``.
    Its default is 4 GiB or a quarter of ``available_bytes``, whichever is less, but enough for one such
    sequence, and for states of layers, as long as it is at most 0.8 of ``available_bytes`` (0:
    unknown). ``num_pages`` overrides all of this.

    Where the KV policy has state, the same bytes also hold state pages and slots, see ``CacheShape.divide``; with
    ``num_pages`` there are state pages for all sequences unless ``num_state_pages`` are given. The host's part of them
    comes on top; it is kept, with the rest where the device is the host, below 0.8 of ``available_bytes`` as long as
    one sequence fits.

    Owners above a blind cut have pages of their own, by default as ``CacheShape.upper_pages_beside`` says; with
    ``num_pages`` ``num_upper_pages`` overrides that.

    Where layers keep a state, the same bytes hold states, see ``count_states``, which ``snapshot_every`` and
    ``num_snapshots`` override.

    Engines with a predictor predict all prompts, and share no prefixes; ``exact_tokens`` is what of them is computed,
    by default the last token.

    Raises:
        EngineError: a limit is above the engine's own or below 1, or one sequence of ``max_seq_len`` tokens
            does not fit, or in main memory ``num_pages`` and what is beside them exceed ``available_bytes``.
    """
    seqs = _limit("max_num_seqs", max_num_seqs, manifest.max_num_seqs)
    tokens = _limit("max_num_tokens", max_num_tokens, manifest.max_num_tokens)
    length = _limit("max_seq_len", max_seq_len, manifest.max_seq_len)
    if kv_cache_gib is not None and not 0 < kv_cache_gib < math.inf:
        raise EngineError(f"kv_cache_gib is {kv_cache_gib}; give a finite size above 0.")
    most = MAX_CACHE_TOKENS // manifest.page_size
    shape, budget = cache_shape(manifest, seqs, length, rows_per_sequence(manifest)), None
    if num_pages is None:
        wanted = bytes_for_all(manifest, shape)
        budget = _budget(manifest, shape, available_bytes, kv_cache_gib, length, wanted)
    reuses = enable_prefix_cache and manifest.policy.max_reusable(length) != 0 and not manifest.predicts
    states = count_states(manifest, shape, budget, num_pages, num_snapshots, snapshot_every, reuses)
    seqs = states.max_num_seqs
    shape = cache_shape(manifest, seqs, length, states.num_rows + states.num_snapshots)
    state_pages = max(seqs * shape.state_pages, int(shape.has_state_pages))
    if budget is not None:
        num_pages, state_pages = shape.divide(budget)
        num_pages = min(num_pages, most)
    assert num_pages is not None
    if not 1 <= num_pages <= most:
        raise EngineError(f"num_pages is {num_pages}; give 1 to {most}.")
    if num_state_pages is None:
        device_bytes = shape.device_bytes(num_pages, state_pages) if manifest.target == "cpu" else 0
        num_state_pages = min(_state_pages_on_host(shape, state_pages, available_bytes, device_bytes), most)
    elif not shape.has_state_pages:
        raise EngineError("num_state_pages is for engines whose KV policy keeps pages of its own; leave it out.")
    elif not 1 <= num_state_pages <= most:
        raise EngineError(f"num_state_pages is {num_state_pages}; give 1 to {most}.")
    if exact_tokens is not None and not manifest.predicts:
        raise EngineError("exact tokens are for engines that predict the cache; build one with --kv-prediction.")
    if num_upper_pages is None:
        num_upper_pages = shape.upper_pages_beside(num_pages)
    elif not manifest.model.is_blind:
        raise EngineError("num_upper_pages is for models with a blind cut; leave it out.")
    elif not 1 <= num_upper_pages <= most:
        raise EngineError(f"num_upper_pages is {num_upper_pages}; give 1 to {most}.")
    if budget is None and manifest.target == "cpu" and available_bytes:
        given = "num_pages" if num_snapshots is None else "num_pages or num_snapshots"
        _check_fits(shape.device_bytes(num_pages, num_state_pages, num_upper_pages), available_bytes, given)
    max_seqs = min(seqs, num_pages, tokens, *([num_upper_pages] if manifest.model.is_blind else []))
    return RuntimeConfig(
        num_pages=num_pages,
        page_size=manifest.page_size,
        max_num_seqs=max_seqs,
        max_num_tokens=tokens,
        max_seq_len=length,
        vocab_size=manifest.vocab_size,
        eos_token_ids=tuple(manifest.eos_token_ids),
        enable_prefix_cache=reuses and (states.num_snapshots > 0 or not states.num_rows),
        max_num_survivors=min(tokens, manifest.max_num_survivors),
        kv_policy=manifest.policy,
        has_observers=manifest.has_observers,
        num_state_pages=num_state_pages,
        num_exact_pages=manifest.num_exact_pages(max_seqs),
        visibility=visibility_of(manifest.model),
        num_upper_pages=num_upper_pages,
        num_state_rows=states.num_rows,
        num_snapshots=states.num_snapshots,
        snapshot_every=states.snapshot_every,
        reads_states=bool(manifest.model.upper_linear),
        exact_tokens=(exact_tokens or ExactTokens()) if manifest.predicts else None,
    )


def _budget(
    manifest: Manifest, shape: CacheShape, available_bytes: int, kv_cache_gib: float | None, length: int, wanted: int
) -> int:
    """Return the bytes of the cache, in which one sequence of ``length`` tokens fits; by default at least ``wanted``
    where that is not too much."""
    needed = shape.least_bytes
    if kv_cache_gib is not None:
        budget = int(min(kv_cache_gib * 2**30, 2.0**62))
    elif available_bytes > 0:
        default = min(DEFAULT_KV_CACHE_BYTES, int(available_bytes * DEFAULT_FRACTION))
        budget = min(max(default, wanted), int(available_bytes * LARGEST_DEFAULT_FRACTION))
    else:
        budget = max(DEFAULT_KV_CACHE_BYTES, wanted)
    if budget < needed:
        per_page = shape.page_bytes + shape.state_page_bytes + shape.upper_page_bytes
        fits = max(budget - shape.fixed_bytes, 0) // per_page * manifest.page_size
        source = "" if kv_cache_gib is not None else " (from free memory)"
        raise EngineError(
            f"the KV cache of {budget / 2**30:.3g} GiB{source} holds {fits} tokens, but one sequence of {length} "
            f"tokens needs {needed / 2**30:.3g} GiB; raise --kv-cache-gib or lower --max-seq-len."
        )
    return budget


def _check_fits(num_bytes: int, available_bytes: int, given: str) -> None:
    """Raise EngineError now: a system that promises more memory than it has ends the process later."""
    if num_bytes > available_bytes:
        raise EngineError(
            f"the KV cache of {num_bytes / 2**30:.3g} GiB is more than the {available_bytes / 2**30:.3g} GiB of memory "
            f"that are free; lower {given}."
        )


def _state_pages_on_host(shape: CacheShape, wanted: int, available_bytes: int, device_bytes: int) -> int:
    """Return how many of the ``wanted`` state pages the host's memory is for, beside ``device_bytes``."""
    if available_bytes == 0 or not shape.state_pages or not shape.host_page_bytes:
        return wanted
    room = int(available_bytes * LARGEST_DEFAULT_FRACTION) - device_bytes
    return min(wanted, max(room // shape.host_page_bytes, shape.state_pages))


def _limit(name: str, asked: int | None, built: int) -> int:
    if asked is None:
        return built
    if asked < 1:
        raise EngineError(f"{name} is {asked}; give 1 to {built}.")
    if asked > built:
        raise EngineError(
            f"{name} is {asked}, but the engine was built for 1 to {built}; lower it or "
            f"rebuild with kvforge build --{name.replace('_', '-')} {asked}."
        )
    return asked
