"""Judges for programs that run engines in their own process: one for each tokenizer, however many engines there are."""

import atexit
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvforge.runtime.guides.judge import Judge
from kvforge.runtime.text.tokenizer import Tokenizer

MAX_JUDGES = 2


@dataclass(frozen=True)
class _Kept:
    judge: Judge
    folder: Path

    def close(self) -> None:
        self.judge.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_lock = threading.Lock()
_kept: dict[tuple[str, tuple[int, ...]], _Kept] = {}


def shared_judge(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Judge:
    """The judge for a tokenizer. It is closed when this program ends, or when MAX_JUDGES others are in use."""
    key = tokenizer.backend.to_str(), tuple(eos_token_ids)
    with _lock:
        kept = _kept.pop(key, None)
        if kept is None:
            folder = Path(tempfile.mkdtemp(prefix="kvforge-guides-"))
            (folder / "tokenizer.json").write_text(key[0], encoding="utf-8")
            kept = _Kept(Judge(folder, key[1]), folder)
        _kept[key] = kept
        while len(_kept) > MAX_JUDGES:
            _kept.pop(next(iter(_kept))).close()
        return kept.judge


@atexit.register
def _close_all() -> None:
    while _kept:
        _kept.popitem()[1].close()
