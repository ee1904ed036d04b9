"""Packing against naive padding: no token is lost, doubled or moved to another sample, and weights lie where they
belong."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvforge.common.errors import KvforgeError
from kvforge.distill.bins import pack
from kvforge.distill.data import pack_samples
from kvforge.distill.packing import DataSettings
from kvforge.distill.samples import Sample

LENGTH = 12


def make(ids: list[int], weights: list[float] | None = None) -> Sample:
    values = np.ones(len(ids)) if weights is None else np.asarray(weights)
    return Sample(np.asarray(ids, np.int32), values.astype(np.float32))


@st.composite
def samples(draw: st.DrawFn, max_tokens: int = LENGTH) -> list[Sample]:
    sizes = draw(st.lists(st.integers(0, max_tokens), min_size=1, max_size=20))
    seed = draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    return [make(rng.integers(0, 50, n).tolist(), rng.integers(0, 3, n).tolist()) for n in sizes]


def pieces(batch) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The (ids, weights) of every segment of a batch but the padding, sorted."""
    found = []
    for ids, segments, weight in zip(batch.input_ids, batch.segments, batch.weight, strict=True):
        changes = segments.diff()
        assert segments[0] == 0 and set(changes.tolist()) <= {0, 1}, "segments are numbered as they come"
        for segment in range(int(segments[-1]) + 1):
            here = segments == segment
            found.append((tuple(ids[here].tolist()), tuple(weight[here].tolist())))
    return sorted(found)


def naive(kept: list[Sample]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What each sample says alone: the weight of predicting the next token, 0 at the last one."""
    return sorted((tuple(s.ids.tolist()), (*s.weights[1:].tolist(), 0.0)) for s in kept)


@settings(deadline=None)
@given(samples())
def test_packing_equals_padding_each_sample(drawn: list[Sample]) -> None:
    kept = [s for s in drawn if s.weights[1:].any()]
    if not kept:
        with pytest.raises(KvforgeError):
            pack_samples(drawn, DataSettings(LENGTH))
        return
    data, report = pack_samples(drawn, DataSettings(LENGTH))
    batch = data.batch(range(data.num_sequences))
    assert batch.input_ids.shape == batch.segments.shape == batch.weight.shape == (data.num_sequences, LENGTH)
    assert (batch.input_ids.dtype, batch.segments.dtype, batch.weight.dtype) == (
        torch.int64,
        torch.int64,
        torch.float32,
    )
    found = pieces(batch)
    expected = naive(kept)
    for sample in expected:
        found.remove(sample)
    assert all(set(ids) == {0} and set(weights) == {0.0} for ids, weights in found), "what is left is padding"
    assert report.num_tokens == data.num_tokens == sum(s.ids.size for s in kept)
    assert report.num_targets == int((batch.weight > 0).sum())
    assert report.num_empty == sum(not s.ids.size for s in drawn)
    assert report.num_without_target == len(drawn) - len(kept) - report.num_empty
    assert float(batch.weight.sum()) == sum(float(s.weights[1:].sum()) for s in kept)


@settings(deadline=None)
@given(samples(max_tokens=5 * LENGTH))
def test_split_keeps_all_tokens_in_order(drawn: list[Sample]) -> None:
    cut = [
        Sample(s.ids[at : at + LENGTH], s.weights[at : at + LENGTH])
        for s in drawn
        for at in range(0, s.ids.size, LENGTH)
    ]
    kept = [s for s in cut if s.weights[1:].any()]
    if not kept:
        return
    data, report = pack_samples(drawn, DataSettings(LENGTH))
    found = pieces(data.batch(range(data.num_sequences)))
    for sample in naive(kept):
        found.remove(sample)
    assert report.num_overlong == sum(s.ids.size > LENGTH for s in drawn)


@given(st.lists(st.integers(1, 40), max_size=200))
def test_pack_places_every_sample_once_and_nothing_could_be_joined(sizes: list[int]) -> None:
    lengths = np.asarray(sizes, np.int64)
    order, starts = pack(lengths, 40)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    filled = [int(lengths[order[a:b]].sum()) for a, b in itertools.pairwise(starts)]
    assert all(0 < total <= 40 for total in filled) and sum(filled) == sum(sizes)
    assert sum(2 * total <= 40 for total in filled) <= 1, "two half-empty sequences"


def test_pack_is_best_fit_in_decreasing_length() -> None:
    order, starts = pack(np.asarray([3, 7, 2, 5, 3]), 10)
    assert [order[a:b].tolist() for a, b in itertools.pairwise(starts)] == [[1, 0], [3, 4, 2]]
    with pytest.raises(ValueError, match="0 to 7"):
        pack(np.asarray([0, 7]), 10)
    with pytest.raises(ValueError, match="holds 6"):
        pack(np.asarray([1, 7]), 6)


def test_hand_written_sequence() -> None:
    data, report = pack_samples([make([5, 6, 7], [9, 0, 1]), make([8, 9, 4, 3])], DataSettings(9))
    batch = data.batch([0])
    assert batch.input_ids.tolist() == [[8, 9, 4, 3, 5, 6, 7, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch.weight.tolist() == [[1, 1, 1, 0, 0, 1, 0, 0, 0]]
    assert report.line() == "2 samples of 7 tokens, 4 of them targets, in 1 sequences of 9 (77.8% full)"
    with pytest.raises(IndexError):
        data.batch([1])


def test_order_of_epochs_is_a_permutation_given_by_seed_and_epoch() -> None:
    data, _ = pack_samples([make([1] * 10)] * 40, DataSettings(10))
    first = data.epoch_order(0, 0)
    assert sorted(first) == list(range(40)) and first == data.epoch_order(0, 0)
    others = [data.epoch_order(0, 1), data.epoch_order(1, 0), data.epoch_order(1, 1)]
    assert first not in others and len({tuple(order) for order in others}) == 3


def test_digest_depends_on_data_and_settings() -> None:
    def digest(drawn: list[Sample], **changes) -> str:
        return pack_samples(drawn, DataSettings(**{"length": 10} | changes))[0].digest

    base = [make([1, 2, 3]), make([4, 5])]
    assert digest(base) == digest([make([1, 2, 3]), make([4, 5])])
    different = [
        digest([make([1, 2, 4]), make([4, 5])]),
        digest([make([1, 2]), make([3, 4, 5])]),
        digest([make([1, 2, 3], [1, 1, 0.5]), make([4, 5])]),
        digest(list(reversed(base))),
        digest(base, length=11),
        digest(base, mask="answers"),
        digest(base, overlong="truncate"),
    ]
    assert len({digest(base), *different}) == 8


def test_overlong_samples() -> None:
    long = make(list(range(25)), [0.0] * 13 + [1.0] * 12)
    data, report = pack_samples([long], DataSettings(10))
    assert (report.num_samples, report.num_overlong, report.num_without_target) == (2, 1, 1), "10 tokens ask nothing"
    assert data.batch([0]).input_ids.tolist() == [list(range(10, 20))]
    assert report.line().endswith("(75.0% full); split: 1; left out for want of a target: 1")
    with pytest.raises(KvforgeError, match="have no target"):
        pack_samples([long], DataSettings(10, overlong="truncate"))
    data, report = pack_samples([long], DataSettings(20, overlong="truncate"))
    assert data.num_tokens == 20 and "truncated" in report.line("truncate")
    with pytest.raises(KvforgeError, match=r"^Sample 2 of x has 25 tokens and --length is 10"):
        pack_samples([make([1, 2]), long], DataSettings(10, overlong="error"), "x")
