"""Which cases a day's run has: each function one at least, and within a week all."""

from types import SimpleNamespace

import pytest

from tests.support.layers import DAILY_S, DAYS, cases_left, cases_of_the_week
from tests.support.random_cases import cases_of_day, in_turn


@pytest.mark.parametrize("count, total", [(1, 1), (1, 7), (2, 9), (3, 9), (6, 100), (5, 3)])
def test_each_comes_in_its_turn(count: int, total: int) -> None:
    days = [set(in_turn(day, count, total)) for day in range(20_000, 20_000 + -(-total // count))]
    assert set().union(*days) == set(range(total))
    assert {len(each) for each in days} == {min(count, total)}


def test_half_of_the_random_cases_are_those_of_each_day() -> None:
    days = [list(cases_of_day(day, 7, 30)) for day in range(20_000, 20_000 + 26)]
    assert set().union(*days) == set(range(30)) and all(len(set(each)) == 7 for each in days)
    assert list(cases_of_day(-1, 7, 30)) == [0, 1, 2, 3]
    assert all(each[:4] == [0, 1, 2, 3] for each in days)
    assert list(cases_of_day(-1, 30, 30)) == list(range(30)), "all are those of each day"


def test_a_week_has_every_case() -> None:
    seconds = {"long": (30, 1.0), "half": (8, DAILY_S / 4), "short": (50, 0.0), "one": (1, 60.0)}
    items = [
        SimpleNamespace(nodeid=f"test_a.py::test_{name}[{index}]")
        for name, (count, _) in seconds.items()
        for index in range(count)
    ]
    durations = {"test_a.py": {item.nodeid[11:]: seconds[item.nodeid[16:].partition("[")[0]][1] for item in items}}
    days = [cases_of_the_week(items, day, durations) for day in range(20_700, 20_700 + DAYS)]  # type: ignore[arg-type]
    assert {item.nodeid for day in days for item in day} == {item.nodeid for item in items}
    for day in days:
        count = {name: sum(f"test_{name}[" in item.nodeid for item in day) for name in seconds}
        assert count == {"long": 5, "half": 4, "short": 50, "one": 1}


def test_a_run_of_some_cases_leaves_the_seconds_of_the_others() -> None:
    known = {
        "test_a.py": {"": 1.0, "@built": 9.0, "test_x[1]": 2.0, "test_x[2]": 3.0, "test_gone": 4.0},
        "test_b.py": {},
    }
    run = [{"test": "test_a.py::test_x[2]"}, {"test": "test_a.py::test_y"}]
    assert cases_left(known, run) == {"test_a.py": {"test_x[1]": 2.0}, "test_b.py": {}}
