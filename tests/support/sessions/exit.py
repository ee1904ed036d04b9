"""The fake session with an early exit that agrees with the model as often as it is told to."""

import random
import zlib

import numpy as np
import torch

from tests.support.sessions.fake import FakeSession, context_logits


class ExitSession(FakeSession):
    """``hidden`` also holds a number of the token's whole context, read back through the page table, which the exit's
    logits are made of: the model's at a share ``agreement`` of all contexts, else others, at every scale of confidence.

    Like a GPU session's, hidden states are valid until the next ``lower``.
    """

    def __init__(self, seed=0, agreement=0.7, scales=(0.1, 1.0, 10.0), **changes):
        super().__init__(seed, **{"early_exit": True, "max_draft_len": 7, **changes})
        self.agreement, self.scales = agreement, scales
        self.known = []
        self.hidden = torch.full((self.manifest.max_num_tokens, 3), torch.nan)
        self.num_upper_rows = 0

    def lower(self, step, pools):
        hidden = super().lower(step, pools)
        self.hidden.fill_(torch.nan)
        self.hidden[: len(hidden), :2] = hidden
        starts = step.query_start.tolist()
        for s, length in enumerate(step.kv_length.tolist()):
            pages = step.page_table[s, : -(-length // self.manifest.page_size)].long()
            context = pools[0][0][pages].reshape(-1, 2)[:length, 0].numpy().astype(np.int32)
            for row in range(starts[s], starts[s + 1]):
                self.hidden[row, 2] = len(self.known)
                self.known.append((context, length - starts[s + 1] + row + 1))
        return self.hidden[: len(hidden)]

    def early_exit(self, hidden, survivor_index):
        assert len(survivor_index) > 0 and survivor_index.dtype == torch.int32
        contexts = [self.known[int(number)] for number in hidden[survivor_index.long(), 2]]
        return torch.from_numpy(np.stack([self.exit_logits(context[:length]) for context, length in contexts]))

    def exit_logits(self, tokens):
        """The exit's float32 logits after these tokens."""
        rng = random.Random(zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes(), self.seed + 1))
        seed = self.seed if rng.random() < self.agreement else self.seed + 2
        return np.float32(rng.choice(self.scales)) * context_logits(tokens, seed, self.manifest.vocab_size)

    def upper(self, step, pools):
        self.num_upper_rows += len(step.survivor_index)
        assert step.hidden.isfinite().all(), "a hidden state that another step has written over"
        return super().upper(step._replace(hidden=step.hidden[:, :2]), pools)
