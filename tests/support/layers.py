"""Which tests run, and in which order: markers by folder, ``--quick``, ``--weekly``, and the longest file first.

``tests/durations.json`` has seconds as measured on one machine (it says which): of a case of each longer test function,
their mean; of each fixture that tests share, as ``@NAME``; of the rest of a file, as ``""``. ``python -m
tests.support.layers LEDGER...`` writes what the ledgers of runs have, the last one's where several do, and leaves what
they do not have as it is, but for tests that are gone.
"""

import json
import math
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger import read
from tests.support.random_cases import WEEK, in_turn

ROOT = Path(__file__).resolve().parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
LONG_S = 0.2
"""From here on a test function is left out of ``--quick``, and those that share a fixture that takes so long."""
NOTED_S = 0.5
"""Cases that take so long together have their seconds in the file, however short each is."""
CASES = 4
"""So many cases of a test function belong to ``--quick``, others on each day."""
DAYS = WEEK
"""Within so many days ``--weekly`` runs each case."""
DAILY_S = 0.5
"""Of a test function, ``--weekly`` runs cases of at least so many seconds on each day."""
RARELY_S = 0.3
"""A case that takes so long has one day in ``DAYS``, and so have all tests of a fixture that does."""
SPREAD = 15
"""Of 400 numbers, the one with which the longest of ``DAYS`` takes least."""
NEW_S = 2.0
"""A test that takes so long and has no seconds in the file is named at the end of a run."""
Durations = dict[str, dict[str, float]]
COMPILED = "engines"
"""The fixture of compiled engines, which ``--quick`` does without."""
KEPT = {"built", "said", "offline", "graphs", "pieces", "checked_operators", "other_isas"}
"""Fixtures that are kept from one run to the next, as ``kept_answers`` does: they take long only where what decides
them changed, and then their tests must run, but for those that take long themselves."""

LAYERS = {
    "tests/cpu/plugins": "kernel",
    "tests/gpu/test_operators_cuda.py": "kernel",
    "tests/gpu/test_ptx_driver.py": "kernel",
    "tests/cpu/compiler": "graph",
    "tests/cpu/engine": "graph",
    "tests/cpu/eviction": "graph",
    "tests/cpu/kv_policies": "graph",
    "tests/cpu/model_defs": "graph",
    "tests/trt": "graph",
    "tests/gpu": "graph",
    "tests/e2e": "serve",
    "tests/vllm": "serve",
    "tests/cpu/gateway": "serve",
    "tests/cpu/serving": "serve",
    "tests/cpu/structure": "docs",
    "tests/cpu/packaging": "docs",
    "tests/cpu/perf": "perf",
    "tests/cpu": "unit",
}
"""Markers by folder or file; the first that holds a test counts."""


def layer_of(file: str) -> str:
    """Return the marker of a test file, a path below the root."""
    return next(layer for part, layer in LAYERS.items() if file == part or file.startswith(f"{part}/"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"no test that takes {LONG_S} s, {CASES} cases of each, no compiled engine, no kernels",
    )
    parser.addoption(
        "--weekly",
        action="store_true",
        help=f"of tests that take long ({DAILY_S:g} s by function), a part on each day: all within {DAYS} days",
    )


def pytest_configure(config: pytest.Config) -> None:
    for layer in sorted(set(LAYERS.values())):
        config.addinivalue_line("markers", f"{layer}: tests below {', '.join(p for p in LAYERS if LAYERS[p] == layer)}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of kernels are not even imported in a quick run."""
    kernels = (ROOT / part for part, layer in LAYERS.items() if layer == "kernel")
    return (config.getoption("--quick") and any(map(collection_path.is_relative_to, kernels))) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Markers are there before ``-m`` looks for them."""
    item.add_marker(layer_of(item.nodeid.partition("::")[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    durations = json.loads(DURATIONS.read_text(encoding="utf-8"))["files"]
    files = {item: item.nodeid.partition("::")[0] for item in items}
    if config.getoption("--quick"):
        quick = [item for item in items if _is_quick(item, durations.get(files[item], {}))]
        _keep(items, few_cases(quick, config.getoption("--day")))
    if config.getoption("--weekly") and not config.getoption("--full"):
        _keep(items, cases_of_the_week(items, config.getoption("--day"), durations))
    seconds: dict[str, float] = defaultdict(float)
    for file, found in durations.items():
        seconds[file] = sum(each for name, each in found.items() if name[:1] in ("", "@"))
    for item in items:
        seconds[files[item]] += _seconds(item, durations)
    items.sort(key=lambda item: -seconds[files[item]])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--quick") or config.getoption("--weekly"):
        durations = json.loads(DURATIONS.read_text(encoding="utf-8"))["files"]
        if found := unknown(terminalreporter.stats.get("passed", []), durations):
            terminalreporter.write_line(
                f"Tests that took {NEW_S:g} s or more and have no seconds in {DURATIONS.relative_to(ROOT)}, which "
                f"decides what runs when ({len(found)}; CONTRIBUTING.md tells how to add): {', '.join(sorted(found))}"
            )


def unknown(reports: Iterable[pytest.TestReport], durations: Durations) -> set[str]:
    """Return the functions of tests that took ``NEW_S`` or more and that ``durations`` do not have."""
    long = {_function(report.nodeid) for report in reports if report.duration >= NEW_S}
    return {name for name in long if name.partition("::")[2] not in durations.get(name.partition("::")[0], {})}


def _keep(items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    chosen = set(kept)
    if deselected := [item for item in items if item not in chosen]:
        items[0].config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item in chosen]


def _seconds(item: pytest.Item, durations: Durations) -> float:
    """Those of one case; 0 of a test that is short or new."""
    file, _, name = _function(item.nodeid).partition("::")
    return durations.get(file, {}).get(name, 0.0)


def _is_quick(item: pytest.Item, durations: dict[str, float]) -> bool:
    """A test that is new counts as quick."""
    fixtures = getattr(item, "fixturenames", ())
    needs = [_function(item.nodeid).partition("::")[2], *(f"@{name}" for name in fixtures)]
    return COMPILED not in fixtures and all(durations.get(each, 0.0) < LONG_S for each in needs)


def few_cases(items: list[pytest.Item], day: int) -> list[pytest.Item]:
    """Those of the day of each function's cases: ``CASES``, or all where the cases are files of the repository."""
    few: list[pytest.Item] = []
    for function, cases in _by_function(items).items():
        count = len(cases) if layer_of(function.partition("::")[0]) == "docs" else CASES
        few += [cases[index] for index in in_turn(day, count, len(cases))]
    return few


def cases_of_the_week(items: list[pytest.Item], day: int, durations: Durations) -> list[pytest.Item]:
    """All tests but those that have another day (``RARELY_S``), and of each function whose cases take more than
    ``DAILY_S`` together the day's cases. A case that is skipped takes no day of others."""
    chosen: list[pytest.Item] = []
    for function, found in _by_function(items).items():
        cases = [case for case in found if case.get_closest_marker("skip") is None] or found
        each, count = _seconds(cases[0], durations), len(cases)
        if fixture := _long_fixture(cases[0], durations):
            chosen += cases if _turn(fixture, day) == 0 else []
        elif each >= RARELY_S:
            chosen += cases[_turn(function, day) :: DAYS]
        else:
            if each * count > DAILY_S:
                count = max(math.ceil(count / DAYS), math.ceil(DAILY_S / each))
            chosen += [cases[index] for index in in_turn(day, count, len(cases))]
    return chosen


def _turn(name: str, day: int) -> int:
    """The number of days, below ``DAYS``, from a name's first day to ``day``. The name alone decides, so that a test
    keeps its day while others come, go and take longer."""
    return (day - zlib.crc32(f"{SPREAD}{name}".encode())) % DAYS


def _long_fixture(item: pytest.Item, durations: Durations) -> str:
    """The longest fixture that takes ``RARELY_S`` or more, with its file; none: an empty text."""
    file = item.nodeid.partition("::")[0]
    known = durations.get(file, {})
    seconds = {name: known.get(f"@{name}", 0.0) for name in getattr(item, "fixturenames", ()) if name not in KEPT}
    longest = max(seconds, key=lambda name: seconds[name], default="")
    return f"{file}::@{longest}" if seconds.get(longest, 0.0) >= RARELY_S else ""


def _by_function(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[_function(item.nodeid)].append(item)
    return functions


def _function(test: str) -> str:
    """A test's id without its case."""
    return test.partition("[")[0]


def durations_of(lines: list[dict[str, Any]], known: Durations) -> Durations:
    """Return seconds by file and name, as the file has them: core time, or the wall clock of what mostly waits. What a
    shared fixture takes is not in those of the test that came first, and is no less than is known: a run may have found
    on the shelf what another must make. What had another day is as it is known."""
    tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    fixtures: dict[str, float] = defaultdict(float)
    for line in lines:
        spent = line["core_s"], line["wall_s"]
        if line["kind"] == "phase":
            tests[line["test"]] = [a + b for a, b in zip(tests[line["test"]], spent, strict=True)]
        elif line["kind"] == "fixture":
            tests[line["test"]] = [a - b for a, b in zip(tests[line["test"]], spent, strict=True)]
            fixtures[f"{line['test'].partition('::')[0]}::@{line['name']}"] += _seconds_of(*spent)
    cases: dict[str, list[float]] = defaultdict(list)
    for test, spent in tests.items():
        cases[_function(test)].append(max(0.0, _seconds_of(*spent)))
    for name, each in fixtures.items():
        file, _, fixture = name.partition("::")
        fixtures[name] = max(each, known.get(file, {}).get(fixture, 0.0))
    long = {name: each for name, each in fixtures.items() if each >= LONG_S}
    long |= {
        name: mean for name, each in cases.items() if (mean := sum(each) / len(each)) >= LONG_S or sum(each) >= NOTED_S
    }
    rest: dict[str, float] = defaultdict(float)
    for name, each in cases.items():
        rest[name.partition("::")[0]] += 0.0 if name in long else sum(each)
    found: dict[str, dict[str, float]] = {file: {"": round(each, 1)} for file, each in sorted(rest.items())}
    ran = {*cases, *fixtures}
    for file, names in found.items():
        names |= {name: each for name, each in known.get(file, {}).items() if name and f"{file}::{name}" not in ran}
    for name, each in sorted(long.items()):
        found[name.partition("::")[0]][name.partition("::")[2]] = round(each, 2)
    return {file: dict(sorted(names.items())) for file, names in found.items()}


def still_there(file: str, names: dict[str, float]) -> dict[str, float]:
    """Return ``names`` without tests and fixtures that the file no longer names."""
    words = set(re.findall(r"\w+", (ROOT / file).read_text(encoding="utf-8")))
    return {name: each for name, each in names.items() if not name or name.lstrip("@").rpartition("::")[2] in words}


def _seconds_of(core_s: float, wall_s: float) -> float:
    return core_s if core_s > wall_s / 4 else wall_s  # several processes share a core


def main() -> None:
    if not sys.argv[1:]:
        sys.exit("Give the ledgers of runs: python -m tests.support.layers FILE...")
    machine = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    files = json.loads(DURATIONS.read_text(encoding="utf-8"))["files"]
    for ledger in sys.argv[1:]:
        files |= durations_of(read(Path(ledger)), files)
    files = {file: still_there(file, each) for file, each in files.items() if (ROOT / file).is_file()}
    measured = {"seconds on": machine.partition(": ")[2], "files": dict(sorted(files.items()))}
    DURATIONS.write_text(json.dumps(measured, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
