"""Headless Chromium by the WebDriver protocol: Debian's packages `chromium` and `chromium-driver` are enough."""

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvforge.common.addresses import find_address
from kvforge.serving.server.ports import choose_ports

WAIT_S = 60.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"enter": "\ue007", "escape": "\ue00c", "tab": "\ue004", "shift": "\ue008"}


class Browser:
    """A window; what it is asked happens when the call returns."""

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def reload(self) -> None:
        self._call("POST", "/refresh", {})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function's body returns in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def type(self, selector: str, text: str) -> None:
        """By the keyboard, into an element."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Keys, held from the first to the last, for whatever has the focus."""
        values = [KEYS.get(key, key) for key in keys]
        down = [{"type": "keyDown", "value": value} for value in values]
        up = [{"type": "keyUp", "value": value} for value in reversed(values)]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": down + up}]})

    def click(self, selector: str) -> None:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[ELEMENT]}/click", {})

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """What `condition` gives once it is true; AssertionError when it never was."""
        deadline = time.monotonic() + WAIT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s; the console says {self.console()}"
            time.sleep(0.05)
        return value

    def console(self) -> list[str]:
        """Warnings and errors since the last call: scripts that fail, and what the page's policy stopped."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def resize(self, width: int, height: int) -> None:
        """The page's size in CSS pixels, less than a window may have too."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def named(self) -> list[tuple[str, str]]:
        """Role and name of each thing that assistive technology is told of."""
        nodes = self.devtools("Accessibility.getFullAXTree", {})["nodes"]
        said = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
        return said

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return call(f"{self._url}{path}", method, body)


def call(url: str, method: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from None


@contextmanager
def run_browser(folder: Path) -> Iterator[Browser]:
    """A browser with `folder` for its files; skips the test where there is none."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("no Chromium here: install Debian's packages chromium and chromium-driver")
    port = choose_ports({"driver": (find_address("127.0.0.1"), 0)})["driver"]
    with (folder / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)}
        )
    try:
        yield from _session(f"http://127.0.0.1:{port}", chromium, folder, process)
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _session(url: str, chromium: str, folder: Path, process: subprocess.Popen) -> Iterator[Browser]:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            call(f"{url}/status", "GET")
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "driver.log").read_text()
            time.sleep(0.05)
    options = {
        "binary": chromium,
        # In a container Chromium is root, or has no user namespaces; it sees nothing but our own page.
        "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
                 "--no-first-run", f"--user-data-dir={folder / 'profile'}"],
    }  # fmt: skip
    wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    session = call(f"{url}/session", "POST", {"capabilities": {"alwaysMatch": wanted}})
    here = f"{url}/session/{session['sessionId']}"
    try:
        yield Browser(here)
    finally:
        call(here, "DELETE")
