"""What ``perf.gpu.student`` brings to a machine: a real model's file, and texts and prompts for its students."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.errors import KvforgeError
from perf.harness.engines import ROOT
from perf.real_model.recovery import WEIGHTS

PLACE = ROOT / "runs" / "real-model"
"""Where docs/real-model.md puts the GGUF file, as its only one, and the folder ``texts``."""


@dataclass(frozen=True)
class Files:
    """A folder with a model, texts and prompts; ``weights`` of an earlier run may be there to go on from."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """The only GGUF file, or the folder ``checkpoint``. Raises KvforgeError where there is neither."""
        found = [*self.folder.glob("*.gguf"), *(p for p in [self.folder / "checkpoint"] if p.is_dir())]
        if len(found) != 1:
            raise KvforgeError(f"{self.folder} has {len(found)} models and one is needed; docs/real-model.md says how.")
        return found[0]

    @property
    def train(self) -> Path:
        """The folder with ``texts.jsonl``, ``prompts.jsonl`` and ``wiki.txt``."""
        return self.folder / "texts" / "train"

    @property
    def held_out(self) -> list[Path]:
        """A text of each kind to be judged on."""
        return sorted((self.folder / "texts" / "held-out").glob("*.txt"))

    @property
    def weights(self) -> Path:
        """May not be there."""
        return self.folder / WEIGHTS

    @property
    def all(self) -> list[Path]:
        """Every file and folder that is carried. Raises KvforgeError where one is missing."""
        needed = [self.checkpoint, *(self.train / name for name in ("texts.jsonl", "prompts.jsonl", "wiki.txt"))]
        if missing := [path for path in needed if not path.exists()]:
            raise KvforgeError(f"{missing[0]} is missing; perf.real_model.texts makes it (docs/real-model.md).")
        if not self.held_out:
            raise KvforgeError(f"{self.folder}/texts/held-out has no .txt file; perf.real_model.texts makes some.")
        return [*needed, *self.held_out, *([self.weights] if self.weights.exists() else [])]

    def copy_to(self, folder: Path) -> None:
        """Copy what is carried."""
        for path in self.all:
            target = folder / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(path, target) if path.is_dir() else shutil.copyfile(path, target)
