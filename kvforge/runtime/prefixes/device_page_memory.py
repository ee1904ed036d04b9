"""The bytes of a page in pools that lie on a GPU."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from kvforge.manifest import Manifest
from kvforge.runtime.prefixes.page_memory import page_rows
from kvforge.runtime.sessions.pools import Pools


class DevicePageMemory:
    """As ``PageMemory``, for pools anywhere: a page goes through locked main memory, on a stream that waits for the
    steps that were begun before it. It has not been run on a GPU.

    One thread copies and one fills at a time: each has its own stream and memory.
    """

    def __init__(self, manifest: Manifest, pools: Pools) -> None:
        self._rows = list(page_rows(manifest, pools))
        widths = [row.shape[1] for row in self._rows]
        self.page_bytes = sum(widths)
        self._copying, self._filling = (_Passage(widths, self._rows[0].device) for _ in range(2))

    def copy(self, page: int, content: memoryview) -> None:
        """Overwrite ``content``, ``page_bytes`` bytes, with a page; it is whole on return."""
        passage = self._copying
        with passage.after_steps():
            for row, part in zip(self._rows, passage.parts, strict=True):
                part.copy_(row[page], non_blocking=True)
        np.copyto(np.frombuffer(content, np.uint8), passage.memory.numpy())

    def fill(self, page: int, content: memoryview) -> None:
        """Overwrite a page with ``content``; steps that begin after the return read it."""
        passage = self._filling
        np.copyto(passage.memory.numpy(), np.frombuffer(content, np.uint8))
        with passage.after_steps():
            for row, part in zip(self._rows, passage.parts, strict=True):
                row[page].copy_(part, non_blocking=True)


class _Passage:
    """Memory for a page on its way, with the part in it of each pool's row, and the stream on which it goes."""

    def __init__(self, widths: list[int], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.memory = torch.empty(sum(widths), dtype=torch.uint8, pin_memory=on_gpu)
        self.parts = self.memory.split(widths)
        self._device, self._stream = device, torch.cuda.Stream(device) if on_gpu else None

    @contextlib.contextmanager
    def after_steps(self) -> Iterator[None]:
        """Work inside follows all steps that were begun, and is done at the end."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
