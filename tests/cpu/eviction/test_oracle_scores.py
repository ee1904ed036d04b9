"""Each rule's score by hand, and how the oracle chooses by it."""

import dataclasses
import math

import pytest
import torch

from tests.support.eviction.entries import Entry, Eviction, Lane, LaneChoice, Look, Moment, Trace
from tests.support.eviction.rules import RULES, Ranking
from tests.support.eviction.selection import choose


def lane(weights: list[list[float]], positions: list[int] | None = None) -> Lane:
    """A lane whose entries were given ``weights``, the last ones by the newest query; which is of the newest entry."""
    positions = positions or list(range(len(weights)))
    entries = []
    for position, given in zip(positions, weights, strict=True):
        queries = range(positions[-1] + 1 - len(given), positions[-1] + 1)
        looks = [
            Look(query, weight, sum(p <= query for p in positions))
            for query, weight in zip(queries, given, strict=True)
        ]
        entries.append(Entry(position, torch.zeros(2), torch.zeros(2), torch.zeros(2), looks))
    return entries


ROWS = [
    [1.0, 0.5, 0.25, 0.25],
    [0.5, 0.5, 0.125],
    [0.25, 0.25],
    [0.375],
]
"""What tokens 0 to 3 were given."""


def moment(computed: int, budget: int, num_prompt: int | None = None, previous: int = 0, **parameters: int) -> Moment:
    return Moment(computed, previous, computed if num_prompt is None else num_prompt, budget, parameters)


def ranking(rule: str, now: Moment, *lanes: Lane) -> Ranking:
    return RULES[rule](list(lanes), 0, now)


def test_positions() -> None:
    for rule, protected in (("streaming", [True, True, False, False]), ("recent", [False] * 4)):
        found = ranking(rule, moment(9, 4, sinks=2), lane(ROWS, [0, 1, 7, 8]))
        assert found == Ranking(protected, [0.0, 1.0, 7.0, 8.0])


def test_h2o() -> None:
    found = ranking("h2o", moment(4, 3), lane(ROWS))
    assert found == Ranking([False, False, False, True], [2.0, 1.125, 0.5, 0.375])
    assert ranking("h2o", moment(4, 5), lane(ROWS)).protected == [False, False, True, True]


def test_scissorhands() -> None:
    """Means are 1, 1/2, 1/3 and 1/4: a weight that equals its mean does not count."""
    found = ranking("scissorhands", moment(4, 3, recent=1), lane(ROWS))
    assert found.protected == [False, False, False, True]
    assert found.scores == [-1.0, -1.0, -1.0, 0.0]
    assert [len(leanings) for leanings in found.leanings or []] == [3, 3, 2, 1]  # that of an only slot is certain
    for now in (moment(4, 3, recent=1, history=1), moment(4, 3, recent=1, previous=3)):
        assert ranking("scissorhands", now, lane(ROWS)).scores == [0.0, -1.0, 0.0, 0.0]


def test_scissorhands_margin() -> None:
    """The entry that stays has one count less; the query of which one would have to turn is a tenth of its mean off."""
    one = [Look(5, 0.6, 2), Look(6, 0.55, 2)]
    other = [Look(5, 0.4, 2), Look(6, 0.45, 2)]
    entries = [
        Entry(position, torch.zeros(2), torch.zeros(2), torch.zeros(2), looks)
        for position, looks in enumerate((one, other))
    ]
    found = choose(entries, ranking("scissorhands", moment(20, 3), entries), 1)
    assert found.kept == (0,) and found.score == 0.0
    assert found.margin == pytest.approx(0.1)  # both 0.55 and 0.45 turn: a tie, which is the newer entry's
    swapped = [dataclasses.replace(entry, position=1 - entry.position) for entry in reversed(entries)]
    assert choose(swapped, ranking("scissorhands", moment(20, 3), swapped), 1).margin == pytest.approx(0.2)


def test_tova() -> None:
    other = lane([[0.0, 0.0, 0.0, 0.125], [0.0, 0.0, 0.5], [0.0, 0.25], [0.125]])
    found = ranking("tova", moment(4, 3), lane(ROWS), other)
    assert found == Ranking([False] * 4, [0.1875, 0.3125, 0.25, 0.25])
    assert choose(other, found, 2) == LaneChoice((1, 3), 0.0, 0.25)  # among equals the newer


def test_snapkv() -> None:
    """Sums of the last two queries are 0.5, 0.625 before the window; a mean over three has a zero outside."""
    found = ranking("snapkv", moment(4, 3, window=2, kernel=3), lane(ROWS))
    assert found.protected == [False, False, True, True]
    assert found.scores[:2] == pytest.approx([1.125 / 3, 1.125 / 3])
    assert ranking("snapkv", moment(4, 3, window=2, kernel=1), lane(ROWS)).scores[:2] == [0.5, 0.625]
    rows = [[weight] for weight in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 0.0)]  # the last token's query alone
    found = ranking("snapkv", moment(7, 3, window=1), lane(rows))
    assert found.scores[:6] == pytest.approx([7 / 5, 15 / 5, 31 / 5, 62 / 5, 60 / 5, 56 / 5])


def test_batchmax() -> None:
    assert ranking("batchmax", moment(4, 3), lane(ROWS)).scores == [0.5, 0.375, 0.25, 0.375]
    kept = lane(ROWS[1:], [1, 8, 9])  # positions, not slots, make ages
    kept[0].looks = [Look(1, 1.0, 1)] * 9
    assert ranking("batchmax", moment(10, 3), kept).scores == [1.0, 0.25, 0.375]


def test_keydiff() -> None:
    """Unit keys at 0, 0 and 90 degrees: their mean points to atan(1/2). Lengths do not matter."""
    entries = lane([[0.0]] * 3)
    for entry, key in zip(entries, ([2.0, 0.0], [0.5, 0.0], [0.0, 3.0]), strict=True):
        entry.key = torch.tensor(key, dtype=torch.float64)
    found = ranking("keydiff", moment(3, 2), entries)
    assert found.scores == pytest.approx([-2 / math.sqrt(5), -2 / math.sqrt(5), -1 / math.sqrt(5)])
    assert choose(entries, found, 2).kept == (1, 2)


def test_roco() -> None:
    """Token 0 has the largest deviation, sqrt((1 + 1/4 + 1/16 + 1/16) / 4 - 1/4), token 1 the next; 2 and 3 none."""
    found = ranking("roco", moment(4, 3, spread=1, sinks=0), lane(ROWS))
    assert found.protected == [True, False, False, False]
    assert found.scores == [0.5, 0.375, 0.25, 0.375]
    assert found.slack == pytest.approx(math.sqrt(0.34375 - 0.25) - math.sqrt(0.515625 / 3 - 0.140625))
    assert ranking("roco", moment(4, 3, spread=2, sinks=0), lane(ROWS)).protected == [True, True, False, False]
    assert ranking("roco", moment(4, 3, spread=3, sinks=0), lane(ROWS)).protected == [True, True, False, True]
    assert ranking("roco", moment(4, 3, spread=0, sinks=3), lane(ROWS)).protected == [True, True, True, False]


def test_choice() -> None:
    """The protected first, then larger scores, then newer positions; a margin only among those that compete."""
    entries = lane([[0.0]] * 4, [2, 5, 6, 9])
    free = Ranking([False] * 4, [3.0, 1.0, 1.0, 2.0])
    assert choose(entries, free, 3) == LaneChoice((2, 6, 9), 0.0, 1.0)
    assert choose(entries, free, 2) == LaneChoice((2, 9), 1.0, 2.0)
    assert choose(entries, free, 1) == LaneChoice((2,), 1.0, 3.0)
    some = Ranking([False, True, False, True], [3.0, 1.0, 1.0, 2.0], slack=0.5)
    assert choose(entries, some, 3) == LaneChoice((2, 5, 9), 0.5, 3.0)
    assert choose(entries, some, 2) == LaneChoice((5, 9), 0.5, 1.0)
    assert choose(entries, Ranking(some.protected, some.scores), 2).margin == math.inf
    assert choose(entries, Ranking(some.protected, some.scores), 1) == LaneChoice((9,), 1.0, 2.0)


def test_near_ties() -> None:
    choice = LaneChoice((3,), 0.25, -0.5)
    assert choice.is_near_tie(0.5) and not choice.is_near_tie(0.375)
    assert dataclasses.replace(choice, unit=1.0).is_near_tie(0.375)
    assert not dataclasses.replace(choice, margin=math.inf).is_near_tie(0.5)
    assert LaneChoice((3,), 0.0, 0.0).is_near_tie(0.0)
    evictions = tuple(Eviction(p, {(0, 0): dataclasses.replace(choice, margin=m)}) for p, m in ((4, 1.0), (5, 0.25)))
    trace = Trace((*evictions, evictions[0]), torch.zeros(1, 1))
    assert trace.certain(0.5) == evictions[:1] and trace.certain(0.375) == trace.evictions
