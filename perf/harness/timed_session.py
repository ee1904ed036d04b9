"""The seconds that an engine's graphs take."""

import time
from collections import Counter
from typing import Any

from torch import Tensor

from kvforge.runtime.sessions.inputs import VerifyStep
from kvforge.runtime.sessions.session import Session


class TimedSession(Session):
    """Adds up the ``seconds`` that each graph of a session runs."""

    def __init__(self, session: Session) -> None:
        self._session, self.manifest = session, session.manifest
        self.seconds: Counter[str] = Counter()

    def allocate_pools(self, *counts: Any) -> Any:
        return self._session.allocate_pools(*counts)

    def verify(self, step: VerifyStep) -> tuple[Tensor, Tensor]:
        return self._session.verify(step)

    def lower(self, *arguments: Any) -> Any:
        return self._timed("lower", arguments)

    def upper(self, *arguments: Any) -> Any:
        return self._timed("upper", arguments)

    def early_exit(self, *arguments: Any) -> Any:
        return self._timed("early_exit", arguments)

    def _timed(self, name: str, arguments: tuple[Any, ...]) -> Any:
        begin = time.perf_counter()
        result = getattr(self._session, name)(*arguments)
        self.seconds[name] += time.perf_counter() - begin
        return result
