"""TensorRT-LLM's tables of words: all words' token ids in one row, their end offsets in the other."""

import numpy as np

from kvforge.errors import RequestError
from kvforge.serving.contract import display_name


def encode_words(words: list[list[int]]) -> np.ndarray:
    """[2, n] int32: all words' token ids one after another, and each word's end offset, padded with -1."""
    flat = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist() if words else []
    return np.array([flat, ends + [-1] * (len(flat) - len(ends))], dtype=np.int32).reshape(2, len(flat))


def decode_words(name: str, table: np.ndarray) -> list[list[int]]:
    """The inverse of `encode_words`. Raises RequestError when the offsets do not fit the ids."""
    if table.ndim != 2 or table.shape[0] != 2:
        raise RequestError(f"input tensor {display_name(name)} must have shape [2, n]")
    ids, offsets = table.tolist()
    words, start = [], 0
    for end in offsets:
        if end == -1:
            break
        if not start < end <= len(ids):
            raise RequestError(f"input tensor {display_name(name)} has offsets that do not fit its ids")
        words.append(ids[start:end])
        start = end
    return words
