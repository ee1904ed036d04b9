"""What the tiny student is distilled on: generated documents as the rows of a file that `kvforge distill` reads."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from kvforge.training.config import EOS_ID, Stage
from kvforge.training.documents import Encode, make_document


def documents(stages: tuple[Stage, ...], seed: int, encode: Encode) -> Iterator[tuple[list[int], list[float]]]:
    """Token ids and target weights of `max_steps * sequences` documents of every stage; the last id is `</s>`."""
    for number, stage in enumerate(stages):
        for i in range(stage.max_steps * stage.sequences):
            rng = random.Random(f"student/{seed}/{number}/{i}")
            document = make_document(rng, stage.length, encode, stage)
            end = document.ids.index(EOS_ID) + 1
            yield document.ids[:end], document.weight[:end]


def write_samples(path: Path, stages: tuple[Stage, ...], seed: int, encode: Encode, weighted: bool = True) -> Path:
    """Writes the documents to `path`, whole or not at all, unless it is there already; `weighted` with the weights."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        with partial.open("w") as file:
            for ids, weights in documents(stages, seed, encode):
                file.write(json.dumps({"input_ids": ids} | ({"weights": weights} if weighted else {})) + "\n")
        partial.replace(path)
    return path
