"""Training data from a file or dataset to packed sequences."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvforge.common.errors import KvforgeError
from kvforge.distill.packing import DataSettings, Overlong, PackedData
from kvforge.distill.samples import Sample, SampleReader


@dataclass(frozen=True)
class DataReport:
    """What became of the data: ``num_samples`` are packed, pieces of split samples counted singly, ``num_overlong``
    were split or truncated; ``num_empty`` had no token, ``num_without_target`` nothing to predict."""

    num_samples: int
    num_tokens: int
    num_targets: int
    num_sequences: int
    length: int
    num_empty: int
    num_without_target: int
    num_overlong: int

    def line(self, overlong: Overlong = "split") -> str:
        """Return the report in one line."""
        fill = self.num_tokens / (self.num_sequences * self.length)
        parts = [
            f"{self.num_samples} samples of {self.num_tokens} tokens, {self.num_targets} of them targets, in "
            f"{self.num_sequences} sequences of {self.length} ({fill:.1%} full)"
        ]
        if self.num_overlong:
            parts.append(f"{'split' if overlong == 'split' else 'truncated'}: {self.num_overlong}")
        if self.num_empty:
            parts.append(f"left out because empty: {self.num_empty}")
        if self.num_without_target:
            parts.append(f"left out for want of a target: {self.num_without_target}")
        return "; ".join(parts)


def load_data(
    source: str | Path, checkpoint: Path, vocab_size: int, settings: DataSettings, show_progress: bool = False
) -> tuple[PackedData, DataReport]:
    """Read, encode and pack training data.

    Args:
        source: a .jsonl or .txt file, a folder of ``Dataset.save_to_disk``, or ``NAME[:[CONFIG:]SPLIT]`` of a Hugging
            Face dataset.
        checkpoint: directory with the tokenizer's files, and the chat template if rows are conversations.
        vocab_size: of the model; no token may be outside it.

    Raises:
        KvforgeError: the data cannot be read, or nothing of it can be trained on; one sentence, with the line number
            where a row is wrong.
    """
    if settings.length < 2:
        raise KvforgeError(f"--length {settings.length} is too short to predict a token; give 2 or more.")
    reader = SampleReader(checkpoint, vocab_size, settings.mask)
    return pack_samples(reader.read(str(source), settings.length, show_progress), settings, str(source))


def pack_samples(
    samples: Iterable[Sample], settings: DataSettings, source: str = "the data"
) -> tuple[PackedData, DataReport]:
    """Cut over-long samples, leave out those without a target, and pack the rest.

    Raises:
        KvforgeError: a sample is too long and ``settings.overlong`` is ``error``, or none is left.
    """
    ids, weights, ends = array("i"), array("f"), array("q")
    num_empty = num_without_target = num_overlong = 0
    for number, sample in enumerate(samples, 1):
        if not sample.ids.size:
            num_empty += 1
            continue
        if sample.ids.size > settings.length:
            num_overlong += 1
            if settings.overlong == "error":
                raise KvforgeError(
                    f"Sample {number} of {source} has {sample.ids.size} tokens and --length is {settings.length}; give "
                    "a larger --length, or --overlong split or truncate."
                )
        pieces = range(0, sample.ids.size if settings.overlong == "split" else 1, settings.length)
        for begin in pieces:
            piece = slice(begin, min(begin + settings.length, sample.ids.size))
            if not sample.weights[piece][1:].any():
                num_without_target += 1
                continue
            ids.frombytes(np.ascontiguousarray(sample.ids[piece], np.int32).tobytes())
            weights.frombytes(np.ascontiguousarray(sample.weights[piece], np.float32).tobytes())
            ends.append(len(ids))
    if not ends:
        raise KvforgeError(_nothing(source, settings, num_empty, num_without_target))
    data = PackedData(
        np.frombuffer(ids, np.int32), np.frombuffer(weights, np.float32), np.frombuffer(ends, np.int64), settings
    )
    report = DataReport(
        data.num_samples,
        data.num_tokens,
        data.num_targets,
        data.num_sequences,
        data.length,
        num_empty,
        num_without_target,
        num_overlong,
    )
    return data, report


def _nothing(source: str, settings: DataSettings, num_empty: int, num_without_target: int) -> str:
    if not num_without_target:
        return f"{source} has no sample with a token ({num_empty} are empty); give other data."
    advice = "use --mask all or give prompts with completions" if settings.mask == "answers" else "give longer samples"
    return (
        f"{source} has nothing to train on: {num_empty} samples are empty and {num_without_target} have no target; "
        f"{advice}."
    )
