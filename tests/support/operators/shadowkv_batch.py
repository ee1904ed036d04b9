"""Sequences of one owner in shared pools, factored and decoded by the operators as a step of the graphs does it."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

import plugins
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.kv_policies.shadowkv.factor import factor_prompt
from model_defs.cache_insertion import Pages
from model_defs.chunk_selection import ChunkSelection, StepChunks
from model_defs.rope import apply_rope, inverse_frequencies, rope_cos_sin
from model_defs.rope_config import RopeConfig

NAN = float("nan")


@dataclass
class Stream:
    """A sequence: its keys, not rotated, and values ``[n, kv_heads, d]``, the first ``num_prompt`` a prompt's."""

    keys: Tensor
    values: Tensor
    num_prompt: int
    factored: bool
    slot: int = -1
    length: int = 0
    """Tokens whose K,V are written."""
    shift: int = 0
    """Cache index minus position of a generated token."""
    pages: list[int] = field(default_factory=list)
    shadow_pages: list[int] = field(default_factory=list)


class Batch:
    """Streams in one owner's pools; pages that are not theirs are NaN."""

    def __init__(self, policy: ShadowKV, streams: list[Stream], page_size: int, rng: random.Random) -> None:
        self.policy, self.streams, self.page_size = policy, streams, page_size
        kv_heads, self.dim = streams[0].keys.shape[1:]
        num_pages = sum(self._num_pages(len(stream.keys)) + 1 for stream in streams) + 2
        self._free = rng.sample(range(num_pages), num_pages)
        shadow = rng.sample(range(num_pages), num_pages)
        paged = (num_pages, page_size, kv_heads, self.dim)
        chunks = (num_pages, page_size // policy.chunk_size, kv_heads)
        slots = rng.sample(range(len(streams) + 1), len(streams))
        self.pool = (
            torch.full(paged, NAN),
            torch.full(paged, NAN),
            torch.full((num_pages, page_size, policy.rank), NAN),
            torch.full((*chunks, self.dim), NAN),
            torch.full(chunks, 1, dtype=torch.uint8),
            torch.full((len(streams) + 1, kv_heads, policy.rank, self.dim), NAN),
            torch.full((len(streams) + 1, kv_heads, policy.max_selected), 3, dtype=torch.int32),
            torch.zeros(len(streams) + 1, kv_heads, 2, dtype=torch.int64),
            torch.full(paged, NAN),
        )
        frequencies = inverse_frequencies(RopeConfig(), self.dim)
        self.rope = rope_cos_sin(torch.arange(max(len(stream.keys) for stream in streams)), frequencies)
        for stream, slot in zip(streams, slots, strict=True):
            stream.slot = slot if stream.factored else -1
            if stream.factored:
                stream.shadow_pages = [shadow.pop() for _ in range(self._num_pages(stream.num_prompt))]

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _index(self, stream: Stream, position: int) -> int:
        """The cache index of a position that is being written."""
        return position + (stream.shift if position >= stream.num_prompt else 0)

    def append(self, counts: list[int]) -> None:
        """Write the next ``counts`` tokens' K,V of each stream; a prompt that ends there is factored first."""
        slots, rows, positions = [], [], []
        for stream, count in zip(self.streams, counts, strict=True):
            for position in range(stream.length, stream.length + count):
                page, offset = divmod(self._index(stream, position), self.page_size)
                while page >= len(stream.pages):
                    stream.pages.append(self._free.pop())
                slots.append(stream.pages[page] * self.page_size + offset)
                rows.append((stream.keys[position], stream.values[position]))
                positions.append(position)
            stream.length += count
        keys, values = (torch.stack(part) for part in zip(*rows, strict=True))
        cos, sin = (table[positions] for table in self.rope)
        plugins.rope_paged_kv_write(keys, values, cos, sin, torch.tensor(slots, dtype=torch.int32), *self.pool[:2])

    def factor(self, stream: Stream, rng: random.Random) -> None:
        """Replace the pages of a prompt that is computed by those of its compact cache."""
        places = self.policy.num_selected(stream.num_prompt) * self.policy.chunk_size
        compact = (
            places
            + self.policy.num_outlier_chunks * self.policy.chunk_size
            + self.policy.tail_length(stream.num_prompt)
        )
        kept = rng.sample(stream.pages, self._num_pages(compact))
        tables = (torch.tensor(pages) for pages in (stream.pages, kept, stream.shadow_pages))
        factor_prompt(self.policy, self.pool, stream.num_prompt, *tables, stream.slot, self.rope)
        freed = sorted(set(stream.pages) - set(kept))
        empty = [kept[index // self.page_size] * self.page_size + index % self.page_size for index in range(places)]
        for pool in self.pool[:2]:
            pool[freed] = NAN
            pool.flatten(0, 1)[empty] = NAN
        self._free += freed
        stream.pages, stream.shift = kept, compact - stream.num_prompt

    def attend(self, queries: list[Tensor]) -> list[Tensor]:
        """Attention of the last ``len(q)`` tokens of each stream, ``q`` ``[n, heads, d]`` not rotated, as one layer
        does it in a step; prefilling and unfactored streams select nothing."""
        policy, table = self.policy, _padded([stream.pages for stream in self.streams])
        sparse = [s if s.slot >= 0 and s.length > s.num_prompt else None for s in self.streams]
        start, positions, lengths = [0], [], []
        for stream, q in zip(self.streams, queries, strict=True):
            positions += range(stream.length - len(q), stream.length)
            start.append(start[-1] + len(q))
            lengths.append(self._index(stream, stream.length - 1) + 1)
        step = StepChunks(
            ChunkSelection(policy.chunk_size, policy.max_selected),
            _int32([s.slot if s else -1 for s in sparse]),
            _padded([s.shadow_pages if s else [] for s in sparse]),
            _int32([policy.num_chunks(s.num_prompt) if s else 0 for s in sparse]),
            _int32([policy.num_selected(s.num_prompt) if s else 0 for s in sparse]),
            *self.rope,
        )
        q, scale = apply_rope(torch.cat(queries), *(t[positions] for t in self.rope)), self.dim**-0.5
        step(q, self.pool, Pages(_int32(start), _int32(lengths), table), scale, 1.0)
        out = plugins.paged_attention(q, *self.pool[:2], _int32(start), _int32(lengths), table, scale)
        return list(out.split([len(part) for part in queries]))

    def selected(self, stream: Stream) -> list[list[int]]:
        """The chunks that each KV head of a factored stream has in its places."""
        places = self.pool[6][stream.slot].tolist()
        return [sorted(chunk for chunk in head if chunk >= 0) for head in places]


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _padded(rows: list[list[int]]) -> Tensor:
    """An int32 table; what is behind a row's end may not be read."""
    width = max(1, *(len(row) for row in rows))
    return _int32([row + [10**6] * (width - len(row)) for row in rows])
