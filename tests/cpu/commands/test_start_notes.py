"""A start that takes long says so again and again, and nothing once it is over."""

import time

import pytest

from kvforge.commands.start_notes import StartNotes
from kvforge.common.display import Display


def test_it_is_said_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    notes, errors = StartNotes(Display(), "the engine", period_s=0.01), ""
    deadline = time.monotonic() + 30
    while errors.count("still") < 3:
        errors += capsys.readouterr().err
        assert time.monotonic() < deadline
    notes.close()
    time.sleep(0.05)
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
    assert errors.startswith("kvforge: starting the engine\nkvforge: still starting the engine, 0 s\n")
    assert notes.seconds > 0.05


def test_quiet_it_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    notes = StartNotes(Display(quiet=True), "the engine", period_s=0.001)
    time.sleep(0.02)
    notes.close()
    assert capsys.readouterr().err == ""
