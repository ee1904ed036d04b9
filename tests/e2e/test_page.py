"""The page in Chromium, through the real server: an answer streams, and the live numbers are those of the engine."""

import re
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


def generated(page) -> float:
    """Tokens that the board knows of."""
    text = page.run("return fetch('page/metrics').then((answer) => answer.text())")
    return sum(float(value) for value in re.findall(r"^kvforge_generated_tokens_total\S* (\S+)$", text, re.MULTILINE))


def test_a_chat_and_the_live_numbers(page, server: TritonServer, llm: LLM) -> None:
    page.run("document.querySelector('#temperature').value = 0; document.querySelector('#max-tokens').value = 24")
    before = generated(page)
    page.type("#text", SENT)
    page.press("enter")
    stored = "return JSON.parse(Object.values(localStorage)[0] ?? '{}').entries?.[1]"
    idle = "return document.querySelector('#stop').disabled"
    page.wait(lambda: page.text("#log") and page.run(idle), "the answer")
    params = SamplingParams(temperature=0.0, max_tokens=24)
    messages = [{"role": "user", "content": SENT}]
    (expected,) = llm.chat(messages, params, use_tqdm=False, chat_template=TEMPLATE)
    answer = page.run(stored)
    assert answer["content"] == expected.outputs[0].text
    num, ttft = re.search(r", (\d+) out · time to first token ([\d.]+) s", answer["figures"]).groups()
    # The gateway itself asks for a token after every five seconds.
    page.wait(lambda: 0 <= generated(page) - before - int(num) <= 5, "the board to count the answer's tokens")
    page.wait(lambda: page.text("#ttft-note") == "mean, last minute", "a time to first token")
    assert float(page.text("#ttft").removesuffix(" s")) <= float(ttft), "the page's clock has the way there and back"
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
