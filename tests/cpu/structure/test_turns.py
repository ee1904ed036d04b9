"""Which cases a day's run has: each function one at least, and within a week all."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.layers import (
    DAILY_S,
    DAYS,
    KEPT,
    NEW_S,
    RARELY_S,
    ROOT,
    cases_of_the_week,
    durations_of,
    still_there,
    unknown,
)
from tests.support.ledger import read
from tests.support.models import shelf
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


@pytest.mark.parametrize("count, total", [(8, 200), (16, 400), (32, 1000), (7, 30), (3, 5), (2, 3)])
@pytest.mark.parametrize("step", [1, DAYS])
def test_every_random_case_comes_each_day_or_each_week(step: int, count: int, total: int) -> None:
    turns = 2 * total // (count // 2) + DAYS
    days = [set(cases_of_day(day, count, total)) for day in range(20_003, 20_003 + turns * step, step)]
    assert set().union(*days) == set(range(total)) and {len(each) for each in days} == {count}


def test_a_week_has_every_case() -> None:
    seconds = {"long": (30, RARELY_S * 0.9), "half": (8, DAILY_S / 4), "short": (50, 0.0), "one": (1, 60.0)}
    rarely = {"rare": (14, 1.0), "full": (9, 2.25), "served": (3, 0.5), "kept": (4, 0.0)}
    seconds |= {name: (count, each * RARELY_S) for name, (count, each) in rarely.items()}

    def item_of(name: str, index: int) -> SimpleNamespace:
        return SimpleNamespace(
            nodeid=f"test_a.py::test_{name}[{index}]",
            get_closest_marker=lambda marker: (marker == "skip" and name == "full" and index != 4) or None,
            fixturenames={"served": ["tmp_path", "server", "quick"], "kept": ["built"]}.get(name, []),
        )

    items = [item_of(name, index) for name, (count, _) in seconds.items() for index in range(count)]
    durations = {"test_a.py": {f"test_{name}": each for name, (_, each) in seconds.items()}}
    durations["test_a.py"] |= {"@server": RARELY_S, "@quick": RARELY_S / 2, "@built": 99.0}
    days = [cases_of_the_week(items, day, durations) for day in range(20_700, 20_700 + DAYS)]  # type: ignore[arg-type]
    run = {item.nodeid for item in items if not item.get_closest_marker("skip")}
    assert {item.nodeid for day in days for item in day} == run and "test_a.py::test_full[4]" in run
    counts = [{name: sum(f"test_{name}[" in item.nodeid for item in day) for name in seconds} for day in days]
    for each in counts:
        assert (each["long"], each["half"], each["short"], each["kept"]) == (5, 4, 50, 4)
    for name in ("one", "full", "served"):
        assert sorted(each[name] for each in counts)[:-1] == [0] * (DAYS - 1), "one day has them all"
    assert [each["rare"] for each in counts] == [2] * DAYS
    names = ("one", "full", "rare", "served")
    fewer = [item for item in items if any(f"test_{name}[" in item.nodeid for name in names)]
    longer = {"test_a.py": {name: 3 * each for name, each in durations["test_a.py"].items() if name != "@quick"}}
    for day, run_then in enumerate(days, 20_700):
        kept = [item for item in run_then if item in fewer]
        assert cases_of_the_week(fewer, day, longer) == kept, "a day stays"  # type: ignore[arg-type]


def test_seconds_are_of_a_case_and_of_shared_fixtures() -> None:
    def line(test: str, kind: str, core_s: float, wall_s: float, name: str = "call") -> dict[str, object]:
        return {"test": f"test_a.py::test_{test}", "kind": kind, "name": name, "core_s": core_s, "wall_s": wall_s}

    lines = [
        line("long[1]", "fixture", 5.0, 5.5, "built"),
        line("long[1]", "phase", 5.0, 5.5, "setup"),
        line("long[1]", "phase", 1.0, 1.1),
        line("long[2]", "phase", 2.0, 2.1),
        line("waits", "phase", 0.1, 3.0),
        *(line(f"many[{index}]", "phase", 0.15, 0.15) for index in range(20)),
        line("short", "phase", 0.1, 0.1),
    ]
    another_day = {"@server": 3.0, "test_rare": 9.0}
    known = {"test_a.py": another_day | {"": 7.0, "@built": 60.0, "test_long": 9.0, "test_short": 8.0}}
    seconds = {"": 0.1, "@built": 60.0, "test_long": 1.5, "test_waits": 3.0, "test_many": 0.15}
    assert durations_of(lines, known) == {"test_a.py": seconds | another_day}
    assert durations_of(lines, {}) == {"test_a.py": seconds | {"@built": 5.0}}


def test_seconds_of_tests_that_are_gone_are_not_kept() -> None:
    kept = {"": 1.0, "test_a_week_has_every_case": 2.0, "@tmp_path": 3.0}
    gone = {f"{begin}{'NOBODY'.lower()}": 4.0 for begin in ("test_", "@", "Case::test_")}
    assert still_there(str(Path(__file__).relative_to(ROOT)), kept | gone) == kept


def test_a_long_test_that_has_no_seconds_is_named() -> None:
    seconds = {"test_a.py::test_known[1]": NEW_S, "test_a.py::test_new[1]": NEW_S, "test_b.py::test_short": NEW_S / 2}
    reports = [SimpleNamespace(nodeid=nodeid, duration=each) for nodeid, each in seconds.items()]
    assert unknown(reports, {"test_a.py": {"test_known": 0.4}}) == {"test_a.py::test_new"}  # type: ignore[arg-type]


def test_fixtures_that_are_kept_are_there() -> None:
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in KEPT if not any(f"\ndef {name}(" in source for source in sources)} == set()


def test_a_run_that_will_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "cache_dir", lambda: tmp_path / "not" / "yet")
    assert shelf.lack_of_space() is None
    monkeypatch.setattr(shelf, "RUN_BYTES", 1 << 60)
    assert "make room, or set TMPDIR to a folder with more." in (shelf.lack_of_space() or "")


def test_a_layer_is_chosen_by_its_marker_and_a_ledger_is_of_one_run(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.write_text("of an earlier run")
    other = "tests/cpu/common/test_exact_intervals.py"

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", other, __file__, *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    ran = run("-m", "unit", "--ledger", str(ledger))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {line["test"].partition("::")[0] for line in read(ledger)} == {other}
    refused = run("--ledger", str(tmp_path))
    assert f"--ledger {tmp_path} cannot be written (Is a directory)." in refused.stderr
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "file" / "cache"
    cache.parent.write_text("")
    monkeypatch.setenv("KVFORGE_CACHE", str(cache))
    with pytest.raises(SystemExit, match=r"cannot be written \(Not a directory\); set KVFORGE_CACHE to a writable"):
        runpy.run_path(shelf.__file__, run_name="__main__")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_builder_ends(interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: BaseException) -> None:
        raise error

    monkeypatch.setattr(shelf.EngineShelf, "engine", lambda self, spec: raises(interrupt()))
    monkeypatch.setattr(shelf.os, "_exit", lambda code: raises(InterruptedError(code)))
    with pytest.raises(InterruptedError):
        shelf._build(shelf.SHARED[0])
