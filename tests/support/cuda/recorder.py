"""Stands in for captured CUDA graphs."""

from collections.abc import Callable

from torch import Tensor


class Recording:
    """A recorded function: replay runs it on whatever its static inputs hold by then."""

    def __init__(self, function: Callable[[], Tensor], result: Tensor) -> None:
        self.function, self.result, self.num_replays = function, result, 0

    def replay(self) -> None:
        self.num_replays += 1
        self.result.copy_(self.function())


class Recorder:
    """What ``GraphRecorder`` is on a GPU."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        result = function().clone()
        self.recordings.append(Recording(function, result))
        return self.recordings[-1], result
