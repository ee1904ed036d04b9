"""Asks worker processes for verdicts on guides, and remembers them."""

import json
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from kvforge.runtime.guides.limits import JUDGE_CPU_S, JUDGE_MEMORY_BYTES, JUDGE_WALL_S
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import GuidedDecoding, guide_error
from kvforge.workers import WorkerDied, WorkerPool, WorkersUnavailable, WorkerTimeout

NUM_WORKERS = 2
MAX_WAITING = 64
"""Guides that wait for a worker; more are refused."""
MAX_KNOWN = 1024
CRASHED = "llguidance fails on it, change it (numbers at the ends of 64 bits do that)"
MAX_KNOWN_BYTES = 32 << 20


class Judge:
    """Verdicts on guides for one tokenizer. Every method may be called from any thread.

    Verdicts are remembered, bad ones too: to send a guide again costs nothing. Who asks for one that is being judged
    waits for that judgement.

    Args:
        tokenizer_dir: holds a tokenizer.json, read by each worker when it starts.
        eos_token_ids: those that end texts; others than the tokenizer's are left out.
        python: the interpreter of the workers.
    """

    def __init__(self, tokenizer_dir: Path, eos_token_ids: Sequence[int], python: str = sys.executable) -> None:
        command = [python, "-m", "kvforge.runtime.guides.worker", str(tokenizer_dir), *map(str, eos_token_ids)]
        self._pool = WorkerPool(command, NUM_WORKERS, JUDGE_MEMORY_BYTES, MAX_WAITING)
        self._lock = threading.Lock()
        self._known: OrderedDict[GuidedDecoding, Verdict] = OrderedDict()
        self._known_bytes = 0
        self._open: dict[GuidedDecoding, Future[Verdict]] = {}

    def warm(self) -> "list[Future[bool]]":
        """Start all workers now, so that no guide waits for one. See WorkerPool.warm."""
        return self._pool.warm()

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._pool.close()

    def submit(self, guided: GuidedDecoding) -> "Future[Verdict]":
        """The verdict, at once where it is known. The future raises WorkersUnavailable where nobody can judge now."""
        with self._lock:
            if guided in self._known:
                self._known.move_to_end(guided)
                return _done(self._known[guided])
            if guided in self._open:
                return self._open[guided]
            verdict: Future[Verdict] = Future()
            self._open[guided] = verdict
        self._ask(guided, verdict, may_retry=True)
        return verdict

    def _ask(self, guided: GuidedDecoding, verdict: "Future[Verdict]", may_retry: bool) -> None:
        started = time.monotonic()

        def on_answer(answer: "Future[bytes]") -> None:
            try:
                take(answer)
            except Exception as error:  # an answer that is none: whoever waits must hear of it
                self._fail(guided, verdict, error)

        def take(answer: "Future[bytes]") -> None:
            error = answer.exception()
            if isinstance(error, WorkerDied) and may_retry:  # somebody else may have killed it
                self._ask(guided, verdict, may_retry=False)
            elif error is None:
                self._finish(guided, verdict, Verdict.from_json(json.loads(answer.result())))
            elif isinstance(error, WorkerTimeout) and time.monotonic() - started < JUDGE_WALL_S:
                words = f"to compile it takes more than {JUDGE_CPU_S:g} s of processor time, simplify it"
                self._finish(guided, verdict, _refused(words))
            elif isinstance(error, WorkerTimeout):  # the machine was at fault, or the worker stood still
                late = WorkersUnavailable(f"the guide was not judged within {JUDGE_WALL_S:g} s; try again.")
                self._fail(guided, verdict, late)
            elif isinstance(error, WorkerDied):
                much = error.raised == "MemoryError"
                words = "it takes too much memory, shorten it" if much else CRASHED
                self._finish(guided, verdict, _refused(words))
            else:
                self._fail(guided, verdict, error)

        try:
            job = self._pool.submit(json.dumps(asdict(guided)).encode(), JUDGE_WALL_S, JUDGE_CPU_S)
        except Exception as error:
            self._fail(guided, verdict, error)
            return
        job.add_done_callback(on_answer)

    def _finish(self, guided: GuidedDecoding, future: "Future[Verdict]", verdict: Verdict) -> None:
        with self._lock:
            del self._open[guided]
            self._known[guided] = verdict
            self._known_bytes += _size(guided, verdict)
            while len(self._known) > MAX_KNOWN or self._known_bytes > MAX_KNOWN_BYTES:
                self._known_bytes -= _size(*self._known.popitem(last=False))
        future.set_result(verdict)

    def _fail(self, guided: GuidedDecoding, future: "Future[Verdict]", error: BaseException) -> None:
        with self._lock:
            self._open.pop(guided, None)
        if not future.done():
            future.set_exception(error)


def _done(verdict: Verdict) -> "Future[Verdict]":
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


def _refused(words: str) -> Verdict:
    return Verdict(refusal=guide_error(f"cannot be used: {words}").refusal)


def _size(guided: GuidedDecoding, verdict: Verdict) -> int:
    return len(guided.guide or "") + len(verdict.grammar) + 200
