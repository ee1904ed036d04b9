"""Samples packed into sequences of one length, and batches of them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvforge.distill.bins import pack

Mask = Literal["all", "answers"]
"""Which tokens are targets: each one, or those of completions and of the assistant's turns."""

Overlong = Literal["split", "truncate", "error"]
"""A sample longer than a sequence: becomes several, loses its end, or is refused."""


@dataclass(frozen=True)
class DataSettings:
    """``length`` is the tokens of a sequence."""

    length: int
    mask: Mask = "all"
    overlong: Overlong = "split"


@dataclass(frozen=True)
class Batch:
    """Sequences of T tokens.

    ``weight[b, t]`` is the weight of predicting the token at t + 1 of the same sample: 0 at a sample's last token and
    at padding. ``segments`` counts the samples of a sequence from 0; padding, whose token is 0, is one segment more.
    """

    input_ids: Tensor  # [B, T] int64
    segments: Tensor  # [B, T] int64
    weight: Tensor  # [B, T] float32


class PackedData:
    """Samples packed into sequences of ``settings.length`` tokens; immutable."""

    def __init__(self, ids: np.ndarray, weights: np.ndarray, ends: np.ndarray, settings: DataSettings) -> None:
        """Pack samples that lie one after another: ``ids`` [tokens] int32, target ``weights`` [tokens] float32, of
        which those of first tokens have no effect, and the position where each sample ``ends`` [samples] int64."""
        self.settings = settings
        self._ids, self._weights = ids, weights
        self._begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        self._ends = ends
        self._order, self._starts = pack(ends - self._begins, settings.length)

    @property
    def num_sequences(self) -> int:
        """Sequences of an epoch."""
        return len(self._starts) - 1

    @property
    def length(self) -> int:
        """Tokens of a sequence, padding included."""
        return self.settings.length

    @property
    def num_samples(self) -> int:
        """Samples, pieces of split ones counted singly."""
        return len(self._ends)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return len(self._ids)

    @property
    def num_targets(self) -> int:
        """Tokens of all samples whose prediction has a weight."""
        return int(np.count_nonzero(self._weights) - np.count_nonzero(self._weights[self._begins]))

    @property
    def digest(self) -> str:
        """A sha256 over the samples and the settings: equal digests are equal batches."""
        digest = hashlib.sha256(json.dumps(asdict(self.settings), sort_keys=True).encode())
        for values in (self._ids, self._weights, self._ends):
            digest.update(len(values).to_bytes(8, "little"))
            digest.update(values.data if len(values) else b"")
        return digest.hexdigest()

    def epoch_order(self, seed: int, epoch: int) -> list[int]:
        """Return the sequences of an epoch in the order to train on: a permutation given by the arguments."""
        return np.random.default_rng([seed, epoch]).permutation(self.num_sequences).tolist()

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sequences ``indices``. Raises IndexError for one that does not exist."""
        shape = (len(indices), self.length)
        ids, segments = np.zeros(shape, np.int64), np.empty(shape, np.int64)
        weight = np.zeros(shape, np.float32)
        for row, index in enumerate(indices):
            if not 0 <= index < self.num_sequences:
                raise IndexError(f"sequence {index} of {self.num_sequences}")
            samples = self._order[self._starts[index] : self._starts[index + 1]]
            at = 0
            for segment, sample in enumerate(samples):
                begin, end = self._begins[sample], self._ends[sample]
                size = end - begin
                ids[row, at : at + size] = self._ids[begin:end]
                segments[row, at : at + size] = segment
                weight[row, at : at + size - 1] = self._weights[begin + 1 : end]
                at += size
            segments[row, at:] = len(samples)
        return Batch(torch.from_numpy(ids), torch.from_numpy(segments), torch.from_numpy(weight))
