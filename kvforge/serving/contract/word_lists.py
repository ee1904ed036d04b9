"""TensorRT-LLM's tables of words: all words' token ids in one row, their end offsets in the other."""

import itertools

import numpy as np

from kvforge.runtime.requests.checks import MAX_ID_WORDS, check_symbols
from kvforge.serving.contract.inputs import FIELDS, refuse
from kvforge.serving.contract.tensors import check_entries


def encode_words(words: list[list[int]]) -> np.ndarray:
    """[2, n] int32: all words' token ids one after another, and each word's end offset, padded with -1."""
    flat = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist() if words else []
    return np.array([flat, ends + [-1] * (len(flat) - len(ends))], dtype=np.int32).reshape(2, len(flat))


def decode_words(name: str, table: np.ndarray) -> list[list[int]]:
    """The inverse of `encode_words`. Raises RequestError when the offsets do not fit the ids, or there are more words
    or ids than SamplingParams takes."""
    if table.ndim != 2 or table.shape[0] != 2:
        raise refuse(name, "must have shape [2, n]")
    ids, offsets = table[0], table[1]
    padding = np.flatnonzero(offsets == -1)
    ends = offsets[: padding[0]] if len(padding) else offsets
    check_entries(name, len(ends), MAX_ID_WORDS)
    if len(ends) == 0:
        return []
    if ends[0] < 1 or ends[-1] > len(ids) or (ends[1:] <= ends[:-1]).any():
        raise refuse(name, "has offsets that do not fit its ids")
    check_symbols(FIELDS.get(name, name), int(ends[-1]), "token ids")
    flat = ids[: ends[-1]].tolist()
    return [flat[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]
