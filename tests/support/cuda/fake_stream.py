"""CUDA streams where there is no GPU: they note for whom they wait."""

import pytest
import torch


class FakeStream:
    """``waited`` lists the streams waited for, in order."""

    def __init__(self, cuda_stream: int = 7) -> None:
        self.cuda_stream = cuda_stream
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        """Note it."""
        self.waited.append(other)


def fake_current_stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """Return what ``torch.cuda.current_stream()`` gives from now on; no CUDA graph is captured on it."""
    stream = FakeStream(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return stream
