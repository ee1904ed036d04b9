"""The depth of random tests: some of their cases in each run, half of them new each day; all with ``--full``."""

import time
from collections.abc import Callable, Iterator

import pytest

DAY_S = 24 * 3600
WEEK = 7
"""Days after which a test that has one of them runs again."""
Seeds = Callable[[int, int], list[int]]


def pytest_addoption(parser: pytest.Parser) -> None:
    today = int(time.time() // DAY_S)
    parser.addoption("--full", action="store_true", help="every random case and specialisation, slow ones too")
    parser.addoption(
        "--day",
        type=int,
        default=today,
        help="days since 1970: which random cases are run; today's. -1: those of every day alone, which must do for "
        "all that tests assert to have met",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "with_full(name=values): cases with these values of a parameter run with --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("with_full")
        if mark is not None and not config.getoption("--full"):
            (name, values), params = *mark.kwargs.items(), item.callspec.params  # type: ignore[attr-defined]
            if params[name] in values:
                item.add_marker(pytest.mark.skip(reason="a further case; run with --full"))


def pytest_report_header(config: pytest.Config) -> str:
    which = "all" if config.getoption("--full") else f"those of --day {config.getoption('--day')}"
    return f"random cases: {which}"


def in_turn(day: int, count: int, total: int) -> Iterator[int]:
    """Yield ``count`` of the numbers 0 to ``total`` - 1, the next ones each day, until all have been there."""
    for index in range(min(count, total)):
        yield (day * count + index) % total


def cases_of_day(day: int, count: int, total: int) -> Iterator[int]:
    """Yield ``count`` of the seeds 0 to ``total`` - 1: the first half the same each day, so that what a test must meet
    is met; of the others some in turn, or none on a day before the first."""
    same = (count + 1) // 2 if count < total else total
    yield from range(same)
    if day >= 0 and count > same:
        new, others = count - same, total - same
        yield from (same + index for index in in_turn(_turn(day, -(-others // new)), new, others))


def _turn(day: int, turns: int) -> int:
    """Which of the turns is a day's: all come on days that follow each other, and on one weekday of all weeks too."""
    week, weekday = divmod(day, WEEK)
    return (week + weekday * -(-turns // WEEK)) % turns


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether this run is the long one (``make test-full``)."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest, full: bool) -> Seeds:
    """``seeds(count, total)``: that many of the random cases 0 to total - 1, as ``cases_of_day`` says; all of them in a
    long run. What a test asserts to have met must be in the half that is the same each day."""
    day = request.config.getoption("--day")
    return lambda count, total: list(range(total)) if full else list(cases_of_day(day, count, total))
