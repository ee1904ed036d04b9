"""What the tiny student is distilled on: generated documents as the rows of a file that `kvforge distill` reads."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from perf.training.config import EOS_ID, Stage
from perf.training.documents import Encode, make_document


def documents(stage: Stage, seed: int, encode: Encode) -> Iterator[list[int]]:
    """Token ids of `max_steps * sequences` documents as `stage` describes them; the last id is `</s>`."""
    for i in range(stage.max_steps * stage.sequences):
        ids = make_document(random.Random(f"student/{seed}/0/{i}"), stage.length, encode, stage).ids
        yield ids[: ids.index(EOS_ID) + 1]


def write_samples(path: Path, stage: Stage, seed: int, encode: Encode) -> Path:
    """Writes the documents to `path`, whole or not at all, unless it is there already; several processes may do so."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        with partial.open("w") as file:
            for ids in documents(stage, seed, encode):
                file.write(json.dumps({"input_ids": ids}) + "\n")
        partial.replace(path)
    return path
