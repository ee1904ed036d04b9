"""The page in Chromium, in front of a fake Triton that answers what a hostile model might."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.cpu.gateway.fake_triton import FakeTriton, Row, bytes_of
from tests.cpu.gateway.http_calls import endless
from tests.support.browser import Browser, run_browser

HOSTILE = "<img src=x onerror=\"window.hit=1\"><script>window.hit=1</script><b id='bold'>&amp; 😀"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with run_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


def ask(browser: Browser, text: str) -> None:
    browser.type("#text", text)
    browser.press("enter")


def idle(browser: Browser) -> bool:
    return browser.run("return document.querySelector('#stop').disabled")


def said(browser: Browser, kind: str) -> list[str]:
    script = "return [...document.querySelectorAll(`#log .${arguments[0]} .said`)].map((e) => e.textContent)"
    return browser.run(script, kind)


def begin(browser: Browser, url: str) -> None:
    browser.console()
    browser.open(url)
    browser.wait(lambda: browser.text("#model") == "tiny", "the model's name")


def test_markup_is_text(browser: Browser, url: str, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of(HOSTILE, request)
    begin(browser, url)
    ask(browser, HOSTILE.replace("😀", ""))
    browser.wait(lambda: said(browser, "assistant") == [HOSTILE] and idle(browser), "the answer")
    assert said(browser, "user") == [HOSTILE.replace("😀", "")]
    assert browser.run("return window.hit ?? document.querySelectorAll('#log img, #log script, #bold').length") == 0
    triton.script = lambda request: bytes_of("fine", request)
    ask(browser, "And?")
    browser.wait(lambda: said(browser, "assistant")[1:] == ["fine"], "the second answer")
    prompt = bytes(token - 3 for token in triton.requests[-1].prompt).decode()
    assert prompt == f"[user]{HOSTILE.replace('😀', '')}[assistant]{HOSTILE}[user]And?[assistant]"
    assert browser.console() == []


def test_the_policy_stops_what_the_page_does_not_hold(browser: Browser, url: str, triton: FakeTriton) -> None:
    begin(browser, url)
    browser.run("const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)")
    assert browser.run("return window.hit ?? 0") == 0
    assert any("Content Security Policy" in message for message in browser.console())


def test_an_answer_grows_and_is_stopped_by_the_keyboard(browser: Browser, url: str, triton: FakeTriton) -> None:
    triton.script = endless(pause_s=0.01)
    begin(browser, url)
    ask(browser, "go on")
    browser.wait(lambda: len(said(browser, "assistant")[0]) > 5, "the answer's beginning")
    assert browser.run("return document.querySelector('#log').getAttribute('aria-busy')") == "true"
    browser.press("escape")
    browser.wait(lambda: idle(browser), "the end")
    browser.wait(lambda: triton.requests[-1].cancelled, "the server to be told")
    assert "stopped" in browser.text("#log")


def test_a_text_is_completed(browser: Browser, url: str, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of(" upon", request)
    begin(browser, url)
    browser.click("#mode-complete")
    ask(browser, "Once")
    browser.wait(lambda: said(browser, "completion") == ["Once upon"] and idle(browser), "the text")
    assert triton.requests[-1].prompt == [byte + 3 for byte in b"Once"]
    assert triton.requests[-1].value("request_output_len") == 256
    browser.click("#clear")
    assert said(browser, "completion") == []


def test_errors_are_shown_and_pass(browser: Browser, url: str, triton: FakeTriton) -> None:
    async def broken(request):
        yield Row([100])
        await asyncio.sleep(0)

    triton.script = broken
    begin(browser, url)
    ask(browser, "x")
    browser.wait(lambda: said(browser, "error"), "the error")
    assert "ended the answer before its end" in said(browser, "error")[0]
    assert idle(browser)


def test_a_key_is_asked_for(browser: Browser, start: Callable[..., str], triton: FakeTriton, monkeypatch) -> None:
    monkeypatch.setenv("KVFORGE_API_KEY", "secret")
    browser.open(start())
    browser.wait(lambda: browser.run("return !document.querySelector('#key-form').hidden"), "the question")
    browser.type("#key", "wrong")
    browser.press("enter")
    browser.wait(lambda: "does not take" in browser.text("#key-note"), "the refusal")
    browser.run("document.querySelector('#key').value = ''")
    browser.type("#key", "secret")
    browser.press("enter")
    browser.wait(lambda: browser.text("#model") == "tiny", "the model's name")
    ask(browser, "x")
    browser.wait(lambda: said(browser, "assistant") == ["hello"], "the answer")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen(browser: Browser, url: str, triton: FakeTriton, scheme: str) -> None:
    """Nothing is wider than the screen; text and ground differ in either scheme."""
    triton.script = lambda request: bytes_of("word" * 200, request)
    browser.resize(360, 740)
    browser.prefer(scheme)
    begin(browser, url)
    browser.run("document.querySelector('details').open = true")
    ask(browser, "x" * 300)
    browser.wait(lambda: said(browser, "assistant") == ["word" * 200], "the answer")
    assert browser.run("const e = document.documentElement; return e.scrollWidth - e.clientWidth") == 0
    ground, ink = browser.run("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
    light, dark = (ground, ink) if scheme == "light" else (ink, ground)
    assert sum(_rgb(light)) > 600 and sum(_rgb(dark)) < 120


def _rgb(color: str) -> list[int]:
    return [int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
