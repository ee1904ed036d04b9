"""The runtime's limits, resolved once from the engine's manifest and the machine's memory."""

from dataclasses import dataclass

from kvforge.engine import Manifest
from kvforge.errors import EngineError

DEFAULT_KV_CACHE_BYTES = 4 << 30
MEMORY_FRACTION = 0.25


@dataclass(frozen=True)
class RuntimeConfig:
    """Limits of one engine in one process; counts of pages, sequences and tokens."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    enable_prefix_cache: bool

    @property
    def max_pages_per_seq(self) -> int:
        """Pages of a sequence of ``max_seq_len`` tokens."""
        return -(-self.max_seq_len // self.page_size)


def resolve_config(manifest: Manifest, available_bytes: int, *, num_pages: int | None = None,
                   kv_cache_gib: float | None = None, max_num_seqs: int | None = None,
                   max_num_tokens: int | None = None, max_seq_len: int | None = None,
                   enable_prefix_cache: bool = True) -> RuntimeConfig:
    """Fill in what the caller left open.

    The pool holds ``max_num_seqs`` sequences of ``max_seq_len`` tokens unless that exceeds ``kv_cache_gib``
    (default: 4 GiB or a quarter of ``available_bytes``, whichever is less); it never holds less than one such
    sequence. ``num_pages`` overrides all of this.

    Raises:
        EngineError: a limit is above the engine's own or below 1.
    """
    seqs = _limit("max_num_seqs", max_num_seqs, manifest.max_num_seqs)
    tokens = _limit("max_num_tokens", max_num_tokens, manifest.max_num_tokens)
    length = _limit("max_seq_len", max_seq_len, manifest.max_seq_len)
    if num_pages is not None and num_pages < 1:
        raise EngineError(f"num_pages is {num_pages}; give at least 1.")
    if kv_cache_gib is not None and not kv_cache_gib > 0:
        raise EngineError(f"kv_cache_gib is {kv_cache_gib}; give a size above 0.")
    if num_pages is None:
        per_sequence = -(-length // manifest.page_size)
        if kv_cache_gib is not None:
            budget = int(kv_cache_gib * 2**30)
        else:
            known = int(available_bytes * MEMORY_FRACTION) if available_bytes > 0 else DEFAULT_KV_CACHE_BYTES
            budget = min(DEFAULT_KV_CACHE_BYTES, known)
        num_pages = max(per_sequence, min(seqs * per_sequence, budget // manifest.page_bytes))
    return RuntimeConfig(num_pages=num_pages, page_size=manifest.page_size, max_num_seqs=seqs,
                         max_num_tokens=tokens, max_seq_len=length, vocab_size=manifest.vocab_size,
                         eos_token_ids=tuple(manifest.eos_token_ids), enable_prefix_cache=enable_prefix_cache)


def _limit(name: str, asked: int | None, built: int) -> int:
    if asked is None:
        return built
    if not 1 <= asked <= built:
        raise EngineError(f"{name} is {asked}, but the engine was built for 1 to {built}; lower it or "
                          f"rebuild with kvforge build --{name.replace('_', '-')} {max(asked, 1)}.")
    return asked
