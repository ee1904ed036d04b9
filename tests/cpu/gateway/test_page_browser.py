"""The page in Chromium, in front of a fake Triton that answers what a hostile model might."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.gateway.fake_triton import FakeTriton, Request, Row, bytes_of
from tests.cpu.gateway.http_calls import endless
from tests.support.browser import Browser, run_browser

XSS = """
<script>window.hit=1</script>

<svg/onload=window.hit=1> <iframe srcdoc="<script>parent.hit=1</script>"> <javascript:window.hit=1>

[a](javascript:window.hit=1) [a](JaVa\tScRiPt:window.hit=1) [a](<java\tscript:window.hit=1>) [a](\x01javascript:hit=1)

[a](java&#115;cript:hit=1) [a](data:text/html,<script>window.hit=1</script>) ![a](data:image/svg+xml,<svg/onload=hit=1>)

[a](vbscript:hit) [a](//evil.example) [a](/page/metrics) [![a](javascript:hit=1)](javascript:hit=1) [a](blob:x)

[good](https://e.org/" onclick="window.hit=1) [good](https://e.org/x'onclick='hit=1 "a\\" onclick=hit=1") https://e.org/"onclick="hit=1

````html"onload="window.hit=1
```
<script>window.hit=1</script>
```
````

| <img src=x onerror=window.hit=1> | [a](javascript:hit=1) |
|---|---|
| `</code><script>window.hit=1</script>` | ![a](https://e.org/i.png) |

# <img src=x onerror=window.hit=1>
> - </ol><script>window.hit=1</script>

```
</code></pre><script>window.hit=1</script>"""
TAGS = "p h3 ul li blockquote figure figcaption span button pre code div table thead tbody tr th td a"
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
    """A page whose browser keeps nothing yet."""
    browser.resize(1280, 900)
    browser.open(url)
    browser.run("localStorage.clear()")
    browser.open(url)
    browser.console()
    browser.wait(lambda: browser.text("#model") == "tiny", "the model's name")


def answered(browser: Browser, url: str, triton: FakeTriton, answer: str, text: str = "x") -> None:
    """A new page on which a message was answered."""
    triton.script = lambda request: bytes_of(answer, request)
    begin(browser, url)
    ask(browser, text)
    finished(browser)


def finished(browser: Browser) -> None:
    script = "return document.querySelectorAll('#log article').length > 1 && document.querySelector('#stop').disabled"
    browser.wait(lambda: browser.run(script), "the answer")


def press(browser: Browser, words: str, index: int = 0) -> None:
    """Click a button of the page by its words."""
    script = "[...document.querySelectorAll('button')].filter((e) => e.textContent === arguments[0])[arguments[1]]"
    browser.run(f"{script}.click()", words, index)


def fill(browser: Browser, **values: Any) -> None:
    script = "for (const [n, v] of Object.entries(arguments[0])) document.querySelector(`[name=${n}]`).value = v"
    browser.run(script, values)


def asked(triton: FakeTriton) -> list[Request]:
    """Requests of the page's user: the gateway asks for one token after one, to see whether the server is ready."""
    return [request for request in triton.requests if len(request.prompt) > 1]


def prompt_of(triton: FakeTriton, index: int = -1) -> str:
    return bytes(token - 3 for token in asked(triton)[index].prompt).decode()


def stored(browser: Browser) -> list[Any]:
    return browser.run("return Object.keys(localStorage).sort().map((k) => [k, localStorage[k]])")


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
    assert prompt_of(triton) == f"[user]{HOSTILE.replace('😀', '')}[assistant]{HOSTILE}[user]And?[assistant]"
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
    browser.wait(lambda: asked(triton)[-1].cancelled, "the server to be told")
    assert "stopped" in browser.text("#log")


def test_a_text_is_completed(browser: Browser, url: str, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of(" upon", request)
    begin(browser, url)
    browser.click("#mode-complete")
    ask(browser, "Once")
    browser.wait(lambda: said(browser, "completion") == ["Once upon"] and idle(browser), "the text")
    assert asked(triton)[-1].prompt == [byte + 3 for byte in b"Once"]
    assert asked(triton)[-1].value("request_output_len") == 1024, "a quarter of this context"
    browser.click("#new")
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
    triton.script = lambda request: bytes_of("fine", request)
    press(browser, "Send again")
    browser.wait(lambda: said(browser, "assistant")[-1:] == ["fine"], "the answer")
    assert said(browser, "error") == [] and said(browser, "user") == ["x"]
    fill(browser, temperature=-1)
    ask(browser, "y")
    browser.wait(lambda: said(browser, "error"), "the refusal")
    assert "temperature" in said(browser, "error")[0] and said(browser, "user") == ["x", "y"]
    fill(browser, temperature="")
    press(browser, "Send again")
    browser.wait(lambda: said(browser, "assistant") == ["fine", "fine"], "the answer")


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
    assert "secret" not in json.dumps(stored(browser))


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 390)])
def test_a_narrow_screen(browser: Browser, url: str, triton: FakeTriton, scheme: str, width: int) -> None:
    """Nothing is wider than the screen; text and ground differ in either scheme."""
    wide = "`" + "word" * 200 + "`\n\n|" + "wide|" * 60 + "\n|" + "-|" * 60 + "\n\n```\n" + "code" * 100 + "\n```"
    browser.prefer(scheme)
    answered(browser, url, triton, wide, "x" * 300)
    browser.resize(width, 740)
    browser.run("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    assert browser.run("const e = document.documentElement; return e.scrollWidth - e.clientWidth") == 0
    ground, ink = browser.run("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
    light, dark = (ground, ink) if scheme == "light" else (ink, ground)
    assert sum(_rgb(light)) > 600 and sum(_rgb(dark)) < 120


def _rgb(color: str) -> list[int]:
    return [int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")]


def test_markup_of_a_hostile_answer_does_nothing(browser: Browser, url: str, triton: FakeTriton) -> None:
    answered(browser, url, triton, XSS)
    tags = browser.run("return [...document.querySelectorAll('#log .said *')].map((e) => e.localName)")
    assert set(tags) <= set(TAGS.split()) and {"table", "figure", "blockquote"} < set(tags)
    names = "return [...document.querySelectorAll('#log .said *')].flatMap((e) => e.getAttributeNames())"
    assert set(browser.run(names)) <= {"class", "href", "rel", "target", "type", "tabindex", "role", "aria-label"}
    links = browser.run("return [...document.querySelectorAll('#log .said a')].map((e) => [e.protocol, e.host, e.rel])")
    assert len(links) == 4 and {tuple(link) for link in links} == {("https:", "e.org", "noopener noreferrer")}
    browser.run("document.querySelectorAll('#log .said *').forEach((e) => e.localName !== 'a' && e.click())")
    assert browser.run("return window.hit ?? 0") == 0
    text = browser.text("#log .assistant .said")
    assert text.count("<script>window.hit=1</script>") == 6 and "[a](javascript:window.hit=1)" in text
    assert browser.console() == []


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# A *b* #\n\nC\n===", "<h3>A <em>b</em></h3><h3>C</h3>"),
        ("**a *b* c** ***d*** __e__ a_b_c 2 * 3 \\*f*",
         "<p><strong>a <em>b</em> c</strong> <em><strong>d</strong></em> <strong>e</strong> a_b_c 2 * 3 *f*</p>"),
        ("~~a~~ `` b`c `` `*d*` `e", "<p><del>a</del> <code>b`c</code> <code>*d*</code> `e</p>"),
        ("- a\n  - b\n\n    c\n- d", "<ul><li>a<ul><li><p>b</p><p>c</p></li></ul></li><li>d</li></ul>"),
        ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("> a\nb\n> - c\n\nd", "<blockquote><p>a\nb</p><ul><li>c</li></ul></blockquote><p>d</p>"),
        ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
        ("|a|b|\n|:-:|-:|\n|`1\\|2`|",
         '<table><thead><tr><th class="middle">a</th><th class="right">b</th></tr></thead><tbody><tr>'
         '<td class="middle"><code>1|2</code></td><td class="right"></td></tr></tbody></table>'),
        ("x\n~~~py\n<b>\n```\n~~~\ny", "<p>x</p><pre><code>&lt;b&gt;\n```</code></pre><p>y</p>"),
        ("```\nopen", "<pre><code>open</code></pre>"),
        ("<https://e.org/?a=1&b> (https://e.org/x_y).",
         '<p><a href="https://e.org/?a=1&amp;b">https://e.org/?a=1&amp;b</a> '
         '(<a href="https://e.org/x_y">https://e.org/x_y</a>).</p>'),
        ("[*a* b](<https://e.org/> 't') [c][d]", '<p><a href="https://e.org/"><em>a</em> b</a> [c][d]</p>'),
    ],
)  # fmt: skip
def test_markdown(browser: Browser, url: str, text: str, html: str) -> None:
    script = """return import("/page/markdown.js").then(({ showMarkdown }) => {
        const shown = ["", arguments[0]].map(() => document.createElement("div"));
        for (let end = 1; end < arguments[0].length; end += 1) showMarkdown(shown[0], arguments[0].slice(0, end));
        return shown.map((place) => {
            showMarkdown(place, arguments[0]);
            place.querySelectorAll("figcaption").forEach((e) => e.remove());
            place.querySelectorAll("figure, .wide").forEach((e) => e.replaceWith(e.firstChild));
            return place.innerHTML.replace(/ (target|rel|tabindex|role|aria-label)="[^"]*"| class=""/g, "");
        }); })"""
    begin(browser, url)
    assert browser.run(script, text) == [html, html], "letter by letter, and at once"


def test_code_is_labelled_and_copied(browser: Browser, url: str, triton: FakeTriton) -> None:
    answered(browser, url, triton, "```python\nx = '<b>'\n```")
    assert browser.text("figcaption span") == "python"
    script = "window.copied = []; navigator.clipboard.writeText = async (text) => void window.copied.push(text)"
    browser.run(script)
    press(browser, "Copy", 0)
    browser.wait(lambda: browser.text("figcaption button") == "Copied", "the code to be copied")
    press(browser, "Copy", 0)
    browser.wait(lambda: browser.run("return window.copied.length") == 2, "the answer to be copied")
    assert browser.run("return window.copied") == ["x = '<b>'", "```python\nx = '<b>'\n```"]


def test_a_streamed_answer_is_laid_out_a_few_times_a_second(browser: Browser, url: str, triton: FakeTriton) -> None:
    triton.script = endless(pause_s=0.002)
    begin(browser, url)
    browser.run("""window.changes = 0; window.begun = performance.now();
        const seen = new MutationObserver(() => (window.changes += 1));
        seen.observe(document.querySelector("#log"), {childList: true, characterData: true, subtree: true})""")
    ask(browser, "go on")
    browser.wait(lambda: len("".join(said(browser, "assistant"))) > 500, "some of the answer")
    changes, passed_ms = browser.run("return [window.changes, performance.now() - window.begun]")
    assert 2 < changes <= passed_ms / 250 + 2
    press(browser, "Stop")
    browser.wait(lambda: asked(triton)[-1].cancelled, "the server to be told")


def test_conversations_outlive_a_reload(browser: Browser, url: str, triton: FakeTriton) -> None:
    answered(browser, url, triton, "**one**", "First")
    browser.reload()
    browser.wait(lambda: said(browser, "assistant") == ["one"], "the conversation")
    assert browser.run("return document.querySelector('#log strong').textContent") == "one"
    browser.click("#new")
    ask(browser, "Second")
    finished(browser)
    assert prompt_of(triton) == "[user]Second[assistant]"
    browser.run("document.querySelector('#title').select()")
    browser.type("#title", "Renamed")
    browser.press("enter")
    browser.click("#text")
    names = "return [...document.querySelectorAll('#list button')].map((e) => e.textContent)"
    browser.wait(lambda: browser.run(names) == ["Renamed", "First"], "the new name")
    press(browser, "First")
    assert said(browser, "user") == ["First"]
    browser.click("#delete")
    assert browser.run(names) == ["Renamed", "First"], "the first click asks"
    browser.click("#delete")
    browser.open(url)
    browser.wait(lambda: browser.run(names) == ["Renamed"], "one conversation")
    assert len(stored(browser)) == 1 and said(browser, "user") == []


def test_nothing_is_kept_where_nobody_wants_it(browser: Browser, url: str, triton: FakeTriton) -> None:
    answered(browser, url, triton, "one")
    assert len(stored(browser)) == 1
    browser.click("#keep")
    assert stored(browser) == [["kvforge.keep", "no"]]
    ask(browser, "more")
    browser.wait(lambda: said(browser, "assistant") == ["one", "one"] and idle(browser), "the answer")
    assert stored(browser) == [["kvforge.keep", "no"]]
    browser.reload()
    browser.wait(lambda: browser.text("#model") == "tiny", "the model's name")
    assert said(browser, "user") == [] and browser.text("#list") == ""
    assert not browser.run("return document.querySelector('#keep').checked")


@pytest.mark.parametrize("broken", ["{", "[]", '{"id": "a", "title": "", "at": 1, "settings": {}, "entries": [{}]}'])
def test_broken_stored_data_is_said_and_left(browser: Browser, url: str, triton: FakeTriton, broken: str) -> None:
    begin(browser, url)
    browser.run("localStorage['kvforge.conversation.a'] = arguments[0]", broken)
    browser.reload()
    browser.wait(lambda: "cannot be read" in browser.text("#shelf-note"), "the news")
    ask(browser, "x")
    finished(browser)
    assert said(browser, "assistant") == ["hello"] and ["kvforge.conversation.a", broken] in stored(browser)
    assert browser.console() == []


def test_a_full_storage_or_none_is_said(browser: Browser, url: str, triton: FakeTriton) -> None:
    begin(browser, url)
    browser.run("for (let n = 1 << 22; n; n >>= 1) try { localStorage['fill' + n] = 'x'.repeat(n) } catch {}")
    browser.run("for (let n = 1 << 22; n; n >>= 1) try { localStorage['more' + n] = 'x'.repeat(n) } catch {}")
    ask(browser, "x")
    finished(browser)
    assert said(browser, "assistant") == ["hello"] and "storage is full" in browser.text("#shelf-note")
    source = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('forbidden') }})"
    added = browser.devtools("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    browser.open(url)
    browser.wait(lambda: browser.text("#model") == "tiny", "the model's name")
    ask(browser, "x")
    finished(browser)
    assert said(browser, "assistant") == ["hello"]
    assert not browser.run("return document.querySelector('#keep').checked") and browser.console() == []
    browser.devtools("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_message_is_edited_and_an_answer_made_anew(browser: Browser, url: str, triton: FakeTriton) -> None:
    answered(browser, url, triton, "one", "First")
    ask(browser, "Second")
    browser.wait(lambda: said(browser, "assistant") == ["one", "one"] and idle(browser), "the answer")
    triton.script = lambda request: bytes_of("two", request)
    press(browser, "Regenerate", 1)
    browser.wait(lambda: said(browser, "assistant") == ["one", "two"] and idle(browser), "the new answer")
    assert prompt_of(triton) == prompt_of(triton, -2) == "[user]First[assistant]one[user]Second[assistant]"
    press(browser, "Edit")
    browser.type(".edit textarea", "!")
    browser.press("escape")
    assert said(browser, "user") == ["First", "Second"]
    press(browser, "Edit")
    browser.type(".edit textarea", "!")
    browser.press("enter")
    browser.wait(lambda: said(browser, "assistant") == ["two"] and idle(browser), "the answer")
    assert said(browser, "user") == ["First!"] and prompt_of(triton) == "[user]First![assistant]"


def test_exports(browser: Browser, url: str, triton: FakeTriton, tmp_path: Path) -> None:
    answered(browser, url, triton, "A `b`", "Say it")
    browser.devtools("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.click("#export-json")
    browser.click("#export-markdown")
    browser.wait(lambda: {"Say-it.json", "Say-it.md"} <= {path.name for path in tmp_path.iterdir()}, "two files")
    told = json.loads((tmp_path / "Say-it.json").read_text())
    assert told["messages"] == [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "A `b`"}]
    assert told["model"] == "tiny" and told["settings"]["max_tokens"] == "1024"
    text = (tmp_path / "Say-it.md").read_text()
    assert text.startswith("# Say it\n\n## You\n\nSay it\n\n## Model\n\nA `b`\n\n*")


def test_settings_are_sent_and_wrong_ones_said_before(browser: Browser, url: str, triton: FakeTriton) -> None:
    begin(browser, url)
    fill(browser, schema="{", system="Be brief")
    ask(browser, "x")
    browser.wait(lambda: "JSON schema of the answer" in browser.text("#talk-note"), "the refusal")
    assert asked(triton) == [] and browser.run("return document.activeElement.name") == "schema"
    assert browser.run("return document.querySelector('#text').value") == "x", "what was typed is not lost"
    sent = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 0.5}
    sent |= {"frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 2**53 - 1, "max_tokens": 9}
    fill(browser, **sent, schema='{"type": "integer"}', stop="a\nb c")
    press(browser, "Send")
    finished(browser)
    (request,) = asked(triton)
    names = {"top_p": "runtime_top_p", "top_k": "runtime_top_k", "max_tokens": "request_output_len"}
    got = {name: request.value(names.get(name, name)) for name in sent if names.get(name, name) in request.tensors}
    assert got == sent
    assert json.loads(request.texts("guided_decoding_guide")[0]) == {"type": "integer"}
    assert prompt_of(triton) == "[system]Be brief[user]x[assistant]"


def test_tools_are_called_and_answered(browser: Browser, url_of_template: str, triton: FakeTriton) -> None:
    said_so = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call> '
    triton.script = lambda request: bytes_of(said_so if len(asked(triton)) == 1 else "Sunny. ", request, "stop")
    begin(browser, url_of_template)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    fill(browser, tools=json.dumps([{"type": "function", "function": {"name": "f", "parameters": schema}}]))
    ask(browser, "Weather?")
    browser.wait(lambda: browser.run("return !!document.querySelector('.results')"), "the question for a result")
    assert browser.text(".call") == 'f({\n  "city": "Rome"\n})'
    browser.reload()
    browser.wait(lambda: browser.run("return !!document.querySelector('.results')"), "the question after a reload")
    browser.type(".results textarea", "25 degrees")
    browser.press("enter")
    browser.wait(lambda: said(browser, "assistant")[-1:] == ["Sunny."], "the answer")
    assert "[user]Weather?" in prompt_of(triton) and "<tool_call>f:city=Rome[tool]25 degrees" in prompt_of(triton)
    assert said(browser, "tool") == ["25 degrees"] and "Result of f" in browser.text("#log .tool")


def test_reasoning_is_folded(browser: Browser, start: Callable[..., str], triton: FakeTriton) -> None:
    answered(browser, start(reasoning_format="think"), triton, "<think>\nHm <b>\n</think>\n\nYes")
    assert said(browser, "assistant") == ["Yes"] and browser.text("#log .assistant .thought .plain").strip() == "Hm <b>"
    assert not browser.run("return document.querySelector('#log details').open")


def test_figures_are_the_answers(browser: Browser, url: str, triton: FakeTriton) -> None:
    async def script(request):
        yield Row([100] * 4)
        await asyncio.sleep(0.05)
        yield Row([101] * 6, finish_reason="length")

    triton.script = script
    begin(browser, url)
    ask(browser, "x")
    finished(browser)
    tokens, first, rate, cut = browser.text("#log .assistant .note").split(" · ")
    assert tokens.startswith(f"{len(asked(triton)[0].prompt)} tokens in") and tokens.endswith(", 10 out")
    assert first.startswith("time to first token 0.") and rate.endswith(" tokens/s") and cut == "cut off at max tokens"
    script = "return import('/page/figures.js').then(({ summary }) => summary(arguments[0]))"
    usage = {"prompt_tokens": 7, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 5}}
    times = {"asked": 100, "first": 350, "last": 1850, "firstTokens": 4, "tokens": 10, "usage": usage, "reason": "stop"}
    assert browser.run(script, times) == "7 tokens in (5 cached), 10 out · time to first token 0.250 s · 4 tokens/s"


def test_roles_names_and_the_keyboard(browser: Browser, url: str, triton: FakeTriton) -> None:
    answered(browser, url, triton, "# T\n\n|a|\n|-|\n\n```\nx\n```")
    browser.run("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    said_to = browser.named()
    assert {("log", "Conversation"), ("navigation", "Conversations"), ("heading", "T")} < set(said_to)
    assert {("article", "Model"), ("group", "Code"), ("group", "Table")} < set(said_to)
    acting = {"button", "textbox", "spinbutton", "checkbox", "radio", "link", "DisclosureTriangle", "region"}
    assert len([role for role, _ in said_to if role == "textbox"]) >= 6
    assert [role for role, name in said_to if role in acting and not name.strip()] == []
    browser.click("#text")
    for letters in ("a", ("shift", "enter"), "b"):
        browser.press(*letters) if isinstance(letters, tuple) else browser.type("#text", letters)
    assert browser.run("return document.querySelector('#text').value") == "a\nb"
    seen = set()
    for _ in range(60):
        browser.press("tab")
        seen.add(browser.run("const e = document.activeElement; return e.id || e.name || e.textContent"))
        look = "const e = document.querySelector(':focus'); return e ? getComputedStyle(e).outlineStyle : 'no focus'"
        assert browser.run(look) != "none"
    assert {"new", "keep", "title", "log", "text", "send", "top_p", "tools", "Copy", "Regenerate", "Edit"} <= seen
