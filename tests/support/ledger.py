"""``--ledger FILE``: where a run's seconds go, one JSON line for each phase of a test and each costly call inside it.

Seconds are wall clock and core time; core time is this process and the children that it has waited for.
``python -m tests.support.ledger FILE`` adds them up by cause and by file.
"""

import functools
import importlib
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = {
    "compile": ("torch._inductor.aoti_compile_and_package", "torch._inductor.aot_compile"),
    "export": ("torch.export.export",),
    "server": ("kvforge.serving.server.launcher.TritonServer.__enter__",),
    "server stop": ("kvforge.serving.server.launcher.TritonServer.__exit__",),
    "command": ("subprocess.Popen.__init__",),
    "wait": ("subprocess.Popen.wait", "subprocess.Popen.communicate"),
}
"""Cause: the functions whose seconds are its own. A call inside another counts for the outer one."""


_now = time.monotonic
"""The true one: tests put others in its place."""


def _core_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


class Ledger:
    """Writes lines that several processes append to one file."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        self.test = ""
        self.inside = 0

    def write(self, **line: object) -> None:
        os.write(self.file, f"{json.dumps(line)}\n".encode())

    @contextmanager
    def measured(self, kind: str, name: str) -> Iterator[None]:
        wall_s, core_s = _now(), _core_s()
        try:
            yield
        finally:
            self.write(
                kind=kind,
                name=name,
                test=self.test,
                wall_s=round(_now() - wall_s, 4),
                core_s=round(_core_s() - core_s, 4),
            )

    def watch(self, cause: str, dotted: str) -> None:
        """Makes the function that ``dotted`` names write a line for each call."""
        owner, name = _owner(dotted)
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def measured(*args: object, **kwargs: object) -> object:
            if self.inside:
                return original(*args, **kwargs)
            self.inside += 1
            try:
                with self.measured("call", cause):
                    return original(*args, **kwargs)
            finally:
                self.inside -= 1

        setattr(owner, name, measured)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.test = item.nodeid
        with self.measured("phase", "setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with self.measured("phase", "call"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        with self.measured("phase", "teardown"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        with self.measured("fixture", fixturedef.argname):
            return (yield)


def _owner(dotted: str) -> tuple[Any, str]:
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ImportError(dotted)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ledger", type=Path, help="write where the seconds went to this file, one JSON line each")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--ledger")
    if path is None:
        return
    if not hasattr(config, "workerinput"):  # before there are workers, who append
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise pytest.UsageError(f"--ledger {path} cannot be written ({error.strerror}).") from None
    ledger = Ledger(path)
    for cause, functions in CALLS.items():
        for dotted in functions:
            ledger.watch(cause, dotted)
    config.pluginmanager.register(ledger, "ledger")


def read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        sys.exit(f"There is no ledger {path}: pytest --ledger {path} writes it.")
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(lines: list[dict[str, Any]], key: Callable[[dict[str, Any]], str], most: int) -> str:
    """Sums of ``lines`` by ``key``, greatest wall clock first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for line in lines:
        entry = sums[key(line)]
        entry[0] += 1
        entry[1] += line["wall_s"]
        entry[2] += line["core_s"]
    rows = sorted(sums.items(), key=lambda item: -item[1][1])
    return "\n".join(
        f"{wall_s:9.1f} s {core_s:9.1f} core-s {n:6.0f} × {name}" for name, (n, wall_s, core_s) in rows[:most]
    )


def main() -> None:
    if not sys.argv[1:]:
        sys.exit("Give the ledger of a run: python -m tests.support.ledger FILE [ROWS]")
    lines = read(Path(sys.argv[1]))
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    phases = [line for line in lines if line["kind"] == "phase"]
    for title, chosen, key in [
        ("phase", phases, lambda line: line["name"]),
        ("cause", [line for line in lines if line["kind"] == "call"], lambda line: line["name"]),
        ("folder", phases, lambda line: str(Path(line["test"].split("::")[0]).parent)),
        ("file", phases, lambda line: line["test"].split("::")[0]),
        ("fixture", [line for line in lines if line["kind"] == "fixture"], lambda line: line["name"]),
        ("test", phases, lambda line: f"{line['test']} {line['name']}"),
    ]:
        print(f"\nBy {title}\n{table(chosen, key, most)}")


if __name__ == "__main__":
    main()
