"""The text that the committed models were trained on stays the same when the suite grows."""

import dataclasses
import hashlib
from pathlib import Path

from tokenizers import Tokenizer

from kvforge.tasks import TASKS
from perf.training.config import TINY_TEACHER
from perf.training.documents import TASK_NAMES, make_batch
from perf.training.tokenizer import FastEncoder, corpus

TOKENIZER = Path(__file__).parents[3] / "model_defs" / "assets" / "tiny-teacher" / "tokenizer.json"


def digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def test_the_trained_tasks_come_first_and_in_their_order() -> None:
    """A batch and the columns of a training's metrics name a task by its place."""
    assert tuple(TASKS)[: len(TASK_NAMES)] == TASK_NAMES


def test_training_batches_are_frozen() -> None:
    encode = FastEncoder(Tokenizer.from_file(str(TOKENIZER)))
    parts = []
    for index, stage in enumerate(TINY_TEACHER.stages):
        batch = make_batch(f"frozen/{index}", dataclasses.replace(stage, sequences=2), encode)
        parts += [x.numpy().tobytes() for x in (batch.input_ids, batch.targets, batch.weight, batch.task)]
    assert digest(parts) == "f8d0affe54db0a83"


def test_the_tokenizer_corpus_is_frozen() -> None:
    assert digest([line.encode() for line in corpus(200, 0)]) == "245729a6ae038683"
