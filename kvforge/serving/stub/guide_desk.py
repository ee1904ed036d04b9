"""The stub's guides: judged before their requests go on to the engine, without holding up other requests."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError, RequestError
from kvforge.runtime.guides.judge import Judge
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import NEEDS_TOKENIZER, GuidedDecoding
from kvforge.workers import WARM_WITHIN_S

logger = logging.getLogger("kvforge.serving")

Verdicts = list[Verdict | None]
MAX_GUIDES = 4
"""Different guides of one request: they are judged and compiled one after another, and others wait."""
NO_TOKENIZER = Verdict(refusal=NEEDS_TOKENIZER)


class GuideDesk:
    """Verdicts on the guides of a request's prompts. Where `tokenizer_dir` has no tokenizer every guide is refused.

    Workers start with it; `wait_started` before guides come.
    """

    def __init__(self, tokenizer_dir: Path, eos_token_ids: Sequence[int], python: str) -> None:
        self._judge = (
            Judge(tokenizer_dir, eos_token_ids, python) if (tokenizer_dir / "tokenizer.json").is_file() else None
        )
        self._started = [] if self._judge is None else self._judge.warm()

    def wait_started(self) -> None:
        """Wait until every worker is ready or has failed to start, which later guides try again; for at most
        WARM_WITHIN_S."""
        ready, _ = wait(self._started, WARM_WITHIN_S)
        if (num_ready := sum(future.result() for future in ready)) < len(self._started):
            logger.warning("%d workers that judge guides have not started yet", len(self._started) - num_ready)

    def close(self) -> None:
        if self._judge is not None:
            self._judge.close()

    def ask(self, guides: Sequence[dict[str, Any] | None], done: Callable[[Verdicts | KvforgeError], None]) -> None:
        """Call `done` with a verdict for each guide (fields of GuidedDecoding), None for None; or with the error that
        nobody can judge now. At once where all verdicts are known, else later from another thread. Raises RequestError
        for more than MAX_GUIDES different guides."""
        wanted = [None if guide is None else GuidedDecoding(**guide) for guide in guides]
        if len(different := {guided for guided in wanted if guided is not None}) > MAX_GUIDES:
            raise RequestError(f"the request has {len(different)} different guides", f"give at most {MAX_GUIDES}")
        asked = [None if guided is None else self._submit(guided) for guided in wanted]
        open_ones = {future for future in asked if future is not None}
        num_open = len(open_ones) + 1
        lock = threading.Lock()

        def count(_: object) -> None:
            nonlocal num_open
            with lock:
                num_open -= 1
                if num_open:
                    return
            done(_results(asked))

        for future in open_ones:
            future.add_done_callback(count)
        count(None)

    def _submit(self, guided: GuidedDecoding) -> "Future[Verdict]":
        if self._judge is not None:
            return self._judge.submit(guided)
        future: Future[Verdict] = Future()
        future.set_result(NO_TOKENIZER)
        return future


def _results(futures: list["Future[Verdict] | None"]) -> Verdicts | KvforgeError:
    try:
        return [None if future is None else future.result() for future in futures]
    except KvforgeError as error:
        return error
    except Exception as error:
        logger.exception("a guide could not be judged")
        return KvforgeError(f"the guide could not be judged: {error}")
