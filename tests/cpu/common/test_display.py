"""How far long work is, with a terminal and without."""

import sys

import pytest

from kvforge.common import display
from kvforge.common.display import Display


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_says_it_each_half_minute(clock, capsys):
    with Display().progress("sample") as show:
        for done in range(100):
            clock[0] += 1
            show(done, 100, "calibrating" if done < 50 else "")
    assert capsys.readouterr().err == (
        "kvforge: calibrating: 29 of 100 samples\nkvforge: 59 of 100 samples\nkvforge: 89 of 100 samples\n"
    )


def test_quiet_says_nothing(clock, capsys):
    with Display(quiet=True).progress("sample") as show:
        clock[0] = 1000
        show(1, 2, "")
    assert capsys.readouterr().err == ""


def test_on_a_terminal_it_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Display().progress("sample") as show:
        show(3, 4, "calibrating")
    shown = capsys.readouterr().err
    assert "calibrating:  75%" in shown and "3/4" in shown and "kvforge: " not in shown
