"""The `postprocessing` model: token ids to text. No other model asks it: it is for clients that call it themselves."""

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.runtime.text.tokenizer import Tokenizer


class Postprocessor:
    """Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def run(self, tokens: np.ndarray | None, lengths: np.ndarray | None) -> np.ndarray:
        """The text of each row, [B * beams] of bytes objects, of `tokens` [B, beams, n] int32 the first `lengths`
        [B, beams] int32. Raises RequestError, naming the tensor."""
        if tokens is None or lengths is None:
            raise RequestError("input tensors 'TOKENS_BATCH' and 'SEQUENCE_LENGTH' are needed")
        _check(tokens, lengths)
        rows = zip(tokens.reshape(-1, tokens.shape[2]), lengths.reshape(-1).tolist(), strict=True)
        texts = [self._tokenizer.decode(row[:length].tolist()).encode() for row, length in rows]
        return np.array(texts, dtype=np.object_)


def _check(tokens: np.ndarray, lengths: np.ndarray) -> None:
    if tokens.ndim != 3 or tokens.shape[:2] != lengths.shape:
        raise RequestError(
            f"has shape {list(lengths.shape)}, which does not fit 'TOKENS_BATCH' of shape {list(tokens.shape)}",
            field="SEQUENCE_LENGTH",
        )
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > tokens.shape[2]:
        raise RequestError(f"must be 0 to {tokens.shape[2]}", field="SEQUENCE_LENGTH")
    if tokens.min(initial=0) < 0:
        raise RequestError("has a token id below 0", field="TOKENS_BATCH")
