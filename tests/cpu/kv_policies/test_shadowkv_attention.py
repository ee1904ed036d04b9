"""ShadowKV's factoring and operators, chained as in a decode step, against the brute-force reference of attention."""

import random

import pytest
import torch

from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.kv_policies.shadowkv.state import CACHED, COUNTS
from model_defs.rope import inverse_frequencies
from model_defs.rope_config import RopeConfig
from plugins import load_library
from tests.support.operators.shadowkv_batch import Batch, Stream
from tests.support.operators.shadowkv_reference import Parameters, ShadowCache, exact_attention, rotate
from tests.support.rounding import assert_near, sum_error, truncation_condition


def rounding(width, dim, length):
    """Of the largest value: fp32 sums of a key from its factors, of a score, of the exponentials and of the values,
    twice, as U and SV are fp32 themselves and the reference is fp64."""
    return 2 * sum_error(width, dim, length, length)


def random_streams(policy, kv_heads, dim, num_generated, rng, everything=False):
    """A few prompts of lengths that are factored, one that is too short where not ``everything`` is, and each
    ``num_generated`` tokens."""
    least = (policy.num_outlier_chunks + policy.max_selected + 1) * policy.chunk_size + policy.num_local_tokens
    lengths = [least + rng.randint(0, 60) for _ in range(rng.randint(1, 2))]
    if not everything:
        lengths.append(rng.randint(1, least - policy.chunk_size))
    rng.shuffle(lengths)
    streams = []
    for length in lengths:
        keys, values = torch.randn(2, length + num_generated, kv_heads, dim)
        keys += 2 * torch.randn(kv_heads, dim)  # keys have a common direction, so that landmarks say something
        streams.append(Stream(keys, values, length, everything or policy.is_factored(length)))
    return streams


class Checked:
    """A batch beside the reference of each of its streams."""

    def __init__(self, policy, streams, page_size, rng):
        self.rng, self.policy = rng, policy
        self.batch = Batch(policy, streams, page_size, rng)
        parameters = Parameters(*(policy.parameters[name] for name in Parameters.__dataclass_fields__))
        self.frequencies = inverse_frequencies(RopeConfig(), streams[0].keys.shape[2])
        self.references = [
            ShadowCache(s.keys[: s.num_prompt], s.values[: s.num_prompt], self.frequencies, parameters, s.factored)
            for s in streams
        ]
        self.conditions = {
            id(s): truncation_condition(s.keys[: s.num_prompt].flatten(1), policy.rank) if s.factored else 1.0
            for s in streams
        }
        self.num_hits = 0

    def prefill(self, late=()):
        """Compute all prompts but the ``late`` ones and factor them."""
        counts = [0 if i in late else stream.num_prompt for i, stream in enumerate(self.batch.streams)]
        self.batch.append(counts)
        for index, stream in enumerate(self.batch.streams):
            if stream.factored and index not in late:
                self.batch.factor(stream, self.rng)

    def step(self, num_heads, num_layers, late=()):
        """One token of each stream, three of the prompt of ``late`` ones, through layers that share the owner."""
        streams = self.batch.streams
        counts = [min(3, s.num_prompt - s.length) if i in late else 1 for i, s in enumerate(streams)]
        self.batch.append(counts)
        for index, (stream, reference) in enumerate(zip(streams, self.references, strict=True)):
            if index not in late:
                reference.append(stream.keys[stream.length - 1], stream.values[stream.length - 1])
        for _ in range(num_layers):
            queries = [torch.randn(count, num_heads, self.batch.dim) for count in counts]
            places, totals = (self.batch.pool[index].clone() for index in (CACHED, COUNTS))
            got = self.batch.attend(queries)
            self.num_hits += int((places == self.batch.pool[CACHED]).sum())
            self._check_counts(places, totals, {s.slot for i, s in enumerate(streams) if s.factored and i not in late})
            for index, stream in enumerate(streams):
                self._check(index in late, stream, self.references[index], queries[index], got[index])

    def _check_counts(self, before, totals, slots):
        """Each head of a factored stream has selected as many chunks as it has, and reused those that were there."""
        after, added = self.batch.pool[CACHED], self.batch.pool[COUNTS] - totals
        for slot, places in enumerate(after):
            kept = (places == before[slot]) & (places >= 0)
            want = torch.stack(((places >= 0).sum(-1), kept.sum(-1)), -1)
            assert torch.equal(added[slot], want if slot in slots else torch.zeros_like(want))

    def _check(self, prefilling, stream, reference, query, got):
        positions = torch.arange(stream.length - len(query), stream.length)
        rotated = rotate(query, positions, self.frequencies)
        if prefilling:
            tokens = torch.arange(stream.length)
            keys = rotate(stream.keys[: stream.length], tokens, self.frequencies)
            padding = rotated.new_zeros(stream.length - len(query), *rotated.shape[1:])
            want = exact_attention(torch.cat((padding, rotated)), keys, stream.values[: stream.length])[-len(query) :]
        else:
            selected = self.batch.selected(stream) if stream.factored else None
            if selected is not None:
                check_selection(reference, rotated[0], selected)
            want = reference.attend(rotated[0], selected)[None]
        bound = rounding(stream.keys[0].numel(), self.batch.dim, stream.length)
        assert_near(got, want, self.conditions[id(stream)] * bound)


def check_selection(reference, query, selected):
    """The same chunks, but for scores that are equal to rounding: an exponential is off by as much as its exponent, a
    sum of products with the mean of a chunk."""
    for head, chunks in enumerate(selected):
        scores, want = reference.scores(query, head), reference.select(query, head)
        assert len(set(chunks)) == len(chunks) == len(want)
        for chunk in set(chunks) ^ set(want):
            size = query.double().norm(dim=-1).max() * reference.landmarks[head][chunk].norm() * query.shape[1] ** -0.5
            bound = 2 * sum_error(reference.parameters.chunk_size, query.shape[1]) * float(size) + sum_error(
                len(scores)
            )
            assert scores[chunk] == pytest.approx(min(scores[other] for other in want), rel=bound)


def random_policy(rng, kv_heads, dim):
    chunk = rng.choice([4, 8, 8, 16])
    return ShadowKV(
        rank=rng.choice([kv_heads * dim, rng.randint(kv_heads * dim // 2, kv_heads * dim)]),
        chunk_size=chunk,
        sparse_budget=chunk * rng.randint(1, 6),
        num_outlier_chunks=rng.choice([0, 1, 4]),
        num_local_tokens=rng.choice([0, 9, 32]),
    )


@pytest.fixture(autouse=True, scope="module")
def kernels():
    load_library()


def random_case(seed, num_generated):
    """A policy, shape and batch: heads from MHA to MQA, any head dim, streams of mixed lengths, factored or not; in
    some a prompt is still being computed in the same steps."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group, dim = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4]), rng.choice([8, 16, 32, 64, 80, 128])
    policy = random_policy(rng, kv_heads, dim)
    streams = random_streams(policy, kv_heads, dim, num_generated, rng)
    checked = Checked(policy, streams, policy.chunk_size * rng.choice([1, 2, 4]), rng)
    late = {rng.randrange(len(streams))} if rng.random() < 0.3 and len(streams) > 1 else set()
    checked.prefill(late)
    for _ in range(num_generated):
        late = {i for i in late if streams[i].length < streams[i].num_prompt}
        if late != {i for i, s in enumerate(streams) if s.length < s.num_prompt}:
            break  # its prompt is done: it would be factored
        checked.step(kv_heads * group, rng.choice([1, 2]), late)
    return checked


@pytest.mark.parametrize("block", range(10))
def test_random_cases(block, seeds):
    """120 cases with --full, else 40, each of two to three sequences."""
    for seed in seeds(4, 12):
        random_case(12 * block + seed, num_generated=4)


@pytest.mark.parametrize("seed", [1001, 1002])
def test_long_generations(seed):
    """Every one of 210 generated tokens is attended; places are kept from step to step."""
    checked = random_case(seed, num_generated=210)
    assert all(stream.length == stream.num_prompt + 210 for stream in checked.batch.streams)
    assert checked.num_hits > 0


@pytest.mark.parametrize("seed", range(8))
def test_budget_of_the_length_at_full_rank_is_exact_attention(seed):
    """Factored although nothing is left out; equal to exact attention but for rounding."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, dim = rng.choice([1, 2, 4]), rng.choice([16, 64, 80])
    policy = ShadowKV(kv_heads * dim, 8, 8 * rng.randint(8, 12), rng.choice([0, 1, 3]), rng.choice([0, 32]))
    lengths = [policy.num_local_tokens + 8 * rng.randint(4, 8) + rng.randint(0, 7) for _ in range(3)]
    streams = []
    for length in lengths:
        assert policy.num_chunks(length) <= policy.num_outlier_chunks + policy.max_selected
        streams.append(Stream(*torch.randn(2, length + 6, kv_heads, dim), length, True))
    batch = Batch(policy, streams, 16, rng)
    batch.append(lengths)
    for stream in streams:
        batch.factor(stream, rng)
    for _ in range(6):
        batch.append([1] * 3)
        queries = [torch.randn(1, 2 * kv_heads, dim) for _ in streams]
        for stream, query, got in zip(streams, queries, batch.attend(queries), strict=True):
            n = stream.length
            positions, frequencies = torch.arange(n), inverse_frequencies(RopeConfig(), dim)
            q = rotate(query.expand(n, -1, -1), positions, frequencies)
            keys = rotate(stream.keys[:n], positions, frequencies)
            want = exact_attention(q, keys, stream.values[:n])[-1:]
            assert_near(got, want, rounding(kv_heads * dim, dim, n))
