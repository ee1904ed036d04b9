"""The tiny student, made as `kvforge rewire` and `kvforge distill` make any other."""

from pathlib import Path

from kvforge.distill import distill_checkpoint
from kvforge.distill.packing import DataSettings
from kvforge.rewire import rewire_checkpoint
from perf.training.config import StudentConfig
from perf.training.documents import Encode
from perf.training.student_data import write_samples


def make_student(recipe: StudentConfig, teacher: Path, folder: Path, encode: Encode) -> Path:
    """The checkpoint of the student of `teacher`, made in `folder`; an interrupted run continues."""
    distilled, rewired = folder / "checkpoint", folder / "rewired"
    if not distilled.exists():
        samples = write_samples(folder / "documents.jsonl", recipe.documents, recipe.seed, encode)
        if not rewired.exists():
            rewire_checkpoint(teacher, rewired, recipe.rewire)
        distill_checkpoint(rewired, distilled, samples, recipe.distill, DataSettings(recipe.distill.length))
    return distilled
