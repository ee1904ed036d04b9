"""Log-probabilities of a prompt's own tokens, filled in as the prompt is computed."""

import numpy as np


class PromptScores:
    """Of a prompt of P tokens, what the model says of each but the first, given all before it.

    The sequences of a request share it. Rows are in the order of tokens: row i is of token i + 1.

    Attributes:
        logprobs: [P - 1] float32, natural logarithm, of the model's own distribution.
        ranks: [P - 1] int32, 1 for the most probable token.
        top_ids, top: [P - 1, k] int32 and float32, the k most probable tokens of each place, the most probable first.
        num_done: rows that are filled in. What is still to be computed must go past the cut.
        is_finite: all logits so far were finite.
    """

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        rows = num_prompt_tokens - 1
        self.logprobs = np.zeros(rows, dtype=np.float32)
        self.ranks = np.zeros(rows, dtype=np.int32)
        self.top_ids = np.zeros((rows, num_top), dtype=np.int32)
        self.top = np.zeros((rows, num_top), dtype=np.float32)
        self.num_done = 0
        self.is_finite = True

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All that is known, in the order of the attributes."""
        return self.logprobs, self.ranks, self.top_ids, self.top

    @classmethod
    def from_bytes(cls, data: bytes, offset: int, num_rows: int, num_top: int) -> "PromptScores":
        """Return what has these ``arrays``, one after the other from ``offset`` on, without a copy."""
        scores = cls(1, num_top)
        counts = (num_rows, num_rows, num_rows * num_top, num_rows * num_top)
        starts = [offset + 4 * sum(counts[:index]) for index in range(4)]
        flat = [
            np.frombuffer(data, dtype, count, start)
            for dtype, count, start in zip((np.float32, np.int32, np.int32, np.float32), counts, starts, strict=True)
        ]
        scores.logprobs, scores.ranks = flat[:2]
        scores.top_ids, scores.top = (column.reshape(num_rows, num_top) for column in flat[2:])
        scores.num_done = num_rows
        return scores
