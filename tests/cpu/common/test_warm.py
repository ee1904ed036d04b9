"""A forked program is like a started one: arguments, folder, environment, output and end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm

PRINTS = """
import os, sys, warnings
print(sys.argv[1:], os.getcwd(), os.environ["OF_THE_TEST"], __name__)
print("to the other stream", file=sys.stderr)
warnings.warn("loud", RuntimeWarning)
"""
PROGRAMS = {
    "prints": PRINTS,
    "an exit status": "raise SystemExit(3)",
    "a sentence": "raise SystemExit('no')",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "an end of its own": "import os; os._exit(4)",
    "at exit": "import atexit; atexit.register(print, 'last')",
    "nothing of another's": "import sys; print(hasattr(sys, 'mark')); sys.mark = 1",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_what_python_does(name: str, tmp_path: Path) -> None:
    arguments = ["-W", "ignore::RuntimeWarning", "-c", PROGRAMS[name], "one", "two"]
    env = {**os.environ, "OF_THE_TEST": "yes"}
    command = [sys.executable, *arguments]
    started = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    for _ in range(2):
        assert vars(warm.run(arguments, env, tmp_path)) == vars(started)


def test_an_error_is_a_traceback() -> None:
    found = warm.run(["-c", "1 / 0"])
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr.startswith("Traceback") and found.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_modules_are_found_as_python_finds_them(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for folder, text in ((tmp_path, "import other; print('here', other.__name__)"), (tmp_path / "below", "")):
        (folder / ("program.py" if text else "other.py")).write_text(text)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "below")}
    found = warm.run(["-m", "program"], env, tmp_path)
    assert (found.returncode, found.stdout) == (0, "here other\n"), found.stderr


def test_torch_is_there_already() -> None:
    assert warm.run(["-c", "import sys; print('torch' in sys.modules)"]).stdout == "True\n"
