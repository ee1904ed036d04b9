"""``kvforge serve --open-page``: a browser of the desktop, where there is one."""

import pytest

from kvforge.commands.serve import open_on_desktop


@pytest.mark.parametrize(
    ("display", "opened"), [({}, False), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "wayland-0"}, True)]
)
def test_a_browser_of_the_terminal_is_never_opened(monkeypatch, display: dict[str, str], opened: bool) -> None:
    seen: list[str] = []
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in display.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("webbrowser.open", seen.append)
    open_on_desktop("http://127.0.0.1:8080/")
    assert bool(seen) == opened
