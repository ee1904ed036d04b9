"""The session without a model whose steps keep states: what is written into a row says which tokens it is of."""

import zlib
from collections import Counter

import torch

from model_defs.linear import LinearAttention
from tests.support.sessions.fake import POISON, FakeSession

STATES = LinearAttention(
    layers=(2,), num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=2, conv_width=2
)  # fmt: skip


class StatefulSession(FakeSession):
    """Asserts of every token that the state before it is that of all tokens before, and of every step that it reads and
    writes rows as ``LinearAttention`` says."""

    def __init__(self, **changes):
        super().__init__(**{"linear": STATES, "num_layers": 3, "cut": 3, **changes})
        self.counts = Counter()

    def allocate_pools(self, num_pages, state_pages=0, num_slots=None, upper_pages=0, state_rows=0):
        self.rows = torch.full((state_rows, 2), int(POISON))
        return [*super().allocate_pools(num_pages), (self.rows,)]

    def lower(self, step, pools):
        hidden = super().lower(step, pools[:2])
        read, write = (tensor.tolist() for tensor in step.rows)
        assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in step.rows)
        starts, ids, positions = step.query_start.tolist(), step.input_ids.tolist(), step.positions.tolist()
        assert len(read) == len(starts) - 1 and len(write) == len(ids) and min(read + write) >= -1
        written = [row for row in write if row >= 0]
        assert len(set(written)) == len(written), "a row is written twice"
        states = [self.rows[row].tolist() if row >= 0 else [0, 0] for row in read]
        self.digests = []
        for s, (count, digest) in enumerate(states):
            own = write[starts[s] : starts[s + 1]]
            assert not {row for row in written if row not in own} & {read[s]}, "read here and written by another"
            for token in range(starts[s], starts[s + 1]):
                assert count == positions[token], "the state is not that of the tokens before"
                count, digest = count + 1, zlib.crc32(bytes([ids[token]]), digest)
                self.digests.append(digest)
                if write[token] >= 0:
                    self.rows[write[token]] = torch.tensor([count, digest])
            self.counts["more_rows"] += sum(row >= 0 for row in own) > 1
        return hidden

    def context(self, s, end, page_table, pools, shadow):
        self.contexts.append(context := super().context(s, end, page_table, pools, shadow))
        return context

    def upper(self, step, pools):
        self.contexts = []
        logits = super().upper(step, pools[:2])
        for row, context in zip(step.survivor_index.tolist(), self.contexts, strict=True):
            expected = zlib.crc32(bytes(int(token) for token in context[:, 0]))
            assert self.digests[row] == expected, "the state is of other tokens"
        return logits
