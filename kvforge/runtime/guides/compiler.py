"""Guides of requests made ready for their sequences; needs llguidance only once a request asks for one."""

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvforge.common.errors import RequestError, refusal_of
from kvforge.runtime.guides.budget import GuideBudget, StepTime
from kvforge.runtime.guides.guide import Guide
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import NEEDS_LLGUIDANCE, NEEDS_TOKENIZER, GuidedDecoding, guide_error
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.workers import WorkersUnavailable

_MAX_CACHED = 16
_QUICK_S = 0.001
"""What it may take to look whether a remembered guide is still good, where the engine's steps wait for it."""


class GuideCompiler:
    """Compiles guides for one model and tokenizer, once they are judged, and remembers the last 16.

    llguidance reads the tokenizer once, which takes up to seconds with a vocabulary of 128k: with ``prepare``, or for
    the first guide. Every method may be called from any thread.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._vocabulary: Any = None
        self._cache: OrderedDict[GuidedDecoding, Guide] = OrderedDict()
        self._step = StepTime()
        self._lock = threading.RLock()

    def prepare(self) -> None:
        """Read the tokenizer now, so that no request waits for it; does nothing where guides cannot be used."""
        if self._tokenizer is not None:
            with contextlib.suppress(RequestError):
                self._read_tokenizer(self._tokenizer)

    def begin_step(self) -> None:
        """A step of the engine begins, whose time its guides share."""
        self._step.begin()

    def begin_sampling(self) -> None:
        """What the step has computed so far was no guide's work."""
        self._step.mark()

    def compile(self, guided: GuidedDecoding, verdict: Verdict | None = None) -> Guide:
        """Return the guide at its start, for one request; every sequence takes its own with ``Guide.start``.

        Without a ``verdict`` the guide is judged first, in a process of its own (``kvforge.runtime.guides.judge``).

        Raises:
            RequestError: llguidance is missing, cannot use the tokenizer, or the guide is refused.
        """
        with self._lock:
            if not self._is_known(guided):
                self._cache[guided] = self._compile(guided, verdict)
                if len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
            return self._start(guided)

    def known(self, guided: GuidedDecoding) -> Guide | None:
        """As ``compile`` where that is quick: the guide is remembered and nothing is being compiled. Else None."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            remembered = self._cache.get(guided)
            is_quick = remembered is not None and remembered.checking_s <= _QUICK_S and self._is_known(guided)
            return self._start(guided) if is_quick else None
        finally:
            self._lock.release()

    def _start(self, guided: GuidedDecoding) -> Guide:
        self._cache.move_to_end(guided)
        return self._cache[guided].start(GuideBudget(hash(guided), self._step))

    def _is_known(self, guided: GuidedDecoding) -> bool:
        known = self._cache.get(guided)
        return known is not None and known.start().is_sound()

    def _compile(self, guided: GuidedDecoding, verdict: Verdict | None) -> Guide:
        if self._tokenizer is None:
            raise RequestError.of(NEEDS_TOKENIZER)
        vocabulary = self._read_tokenizer(self._tokenizer)
        verdict = self._judged(self._tokenizer, guided) if verdict is None else verdict
        grammar, limits = verdict.accepted()
        from kvforge.runtime.guides.matchers import make_matcher

        make = functools.partial(make_matcher, vocabulary, grammar, limits)
        guide = Guide(make, vocabulary.vocab_size, vocabulary.eos_tokens, self._vocab_size)
        if not guide.is_sound():
            raise guide_error("cannot be used", "change it")
        return guide

    def _read_tokenizer(self, tokenizer: Tokenizer) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(tokenizer, self._eos_token_ids)
            return self._vocabulary

    def _judged(self, tokenizer: Tokenizer, guided: GuidedDecoding) -> Verdict:
        from kvforge.runtime.guides.shared import shared_judge

        judge = shared_judge(tokenizer, self._eos_token_ids)
        try:
            return judge.submit(guided).result()
        except WorkersUnavailable as error:
            raise guide_error(f"cannot be used now: {refusal_of(error).reason}") from None


def _vocabulary(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Any:
    try:
        from kvforge.runtime.guides.matchers import make_vocabulary
    except ImportError:
        raise RequestError.of(NEEDS_LLGUIDANCE) from None
    return make_vocabulary(tokenizer, eos_token_ids)
