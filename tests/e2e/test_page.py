"""The page in Chromium, through the real server: an answer streams, and the live numbers are those of the engine."""

from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from kvforge.serving.server.launcher import TritonServer
from tests.support.browser import run_browser
from tests.support.models.chat import TEMPLATE
from tests.support.serving.gateway_process import MODEL, run_gateway
from tests.support.serving.server import used_pages, wait_until

SENT = "Hello there"


@pytest.fixture(scope="module")
def page(server: TritonServer, tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("page")
    (folder / "template.jinja").write_text(TEMPLATE)
    with (
        run_browser(folder) as browser,
        run_gateway(server, folder, chat_template=folder / "template.jinja", metrics=server.metrics_url) as gateway,
    ):
        browser.open(gateway.url)
        browser.wait(lambda: browser.text("#model") == MODEL, "the model's name")
        yield browser


def test_a_chat_and_the_live_numbers(page, server: TritonServer, llm: LLM) -> None:
    page.run("document.querySelector('#temperature').value = 0; document.querySelector('#max-tokens').value = 24")
    page.type("#text", SENT)
    page.press("enter")
    page.wait(lambda: "24 out" in page.text("#log") or "stop" in page.text("#log .assistant .note"), "the answer")
    params = SamplingParams(temperature=0.0, max_tokens=24)
    messages = [{"role": "user", "content": SENT}]
    (expected,) = llm.chat(messages, params, use_tqdm=False, chat_template=TEMPLATE)
    assert page.text("#log .assistant .said") == expected.outputs[0].text
    page.wait(lambda: page.text("#ttft").endswith(" s"), "a time to first token")
    page.wait(lambda: page.text("#running") == "0" and page.text("#state") == "ready", "an idle server")

    page.run("document.querySelector('#max-tokens').value = 60000")
    page.type("#text", "On and on")
    page.press("enter")
    page.wait(lambda: page.text("#running") == "1", "a running sequence")
    page.wait(lambda: int(page.text("#rate")) > 0, "a rate of tokens")
    page.wait(lambda: page.run("return document.querySelectorAll('#pages .used').length") > 0, "a page in use")
    page.wait(lambda: page.text("#pages-note").split(" ")[0] != "0" and page.text("#memory") != "0 B", "memory in use")
    page.click("#stop")
    wait_until(lambda: used_pages(server) == 0, "the pages to be freed")
    page.wait(lambda: page.text("#running") == "0", "the page to say so")
    assert page.console() == []
