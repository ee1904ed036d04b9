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

[good](https://e.org/" onclick="hit=1) [good](https://e.org/x'onclick='hit=1 "a\\" onclick=hit=1") https://e.org/"onclick="

````html"onload="hit=1
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


class Page:
    """The page in a browser, and the Triton behind it."""

    def __init__(self, browser: Browser, url: str, triton: FakeTriton) -> None:
        self.browser, self.url, self.triton = browser, url, triton
        self.run, self.text, self.type, self.keys = browser.run, browser.text, browser.type, browser.press
        self.click, self.wait, self.console = browser.click, browser.wait, browser.console

    def begin(self) -> None:
        """A browser that keeps nothing yet."""
        self.browser.resize(1280, 900)
        self.browser.open(self.url)
        self.run("localStorage.clear()")
        self.open()

    def open(self) -> None:
        self.browser.open(self.url)
        self.console()
        self.wait(lambda: self.text("#model") == "tiny", "the model's name")

    def say(self, text: str, finish: str = "length") -> None:
        self.triton.script = lambda request: bytes_of(text, request, finish)

    def ask(self, text: str) -> None:
        self.type("#text", text)
        self.keys("enter")

    def answered(self, text: str, answer: str | None = None) -> None:
        """Say something and wait for the answer."""
        if answer is not None:
            self.say(answer)
        before = len(self.said("assistant"))
        self.ask(text)
        self.wait(lambda: len(self.said("assistant")) > before and self.idle(), "the answer")

    def idle(self) -> bool:
        return self.run("return document.querySelector('#stop').disabled")

    def said(self, kind: str) -> list[str]:
        return self.all(f"#log .{kind} .said")

    def all(self, selector: str, of: str = "e.textContent") -> list[Any]:
        return self.run(f"return [...document.querySelectorAll(arguments[0])].map((e) => {of})", selector)

    def press(self, words: str, index: int = 0) -> None:
        """Click a button by its words."""
        script = "[...document.querySelectorAll('button')].filter((e) => e.textContent === arguments[0])[arguments[1]]"
        self.run(f"{script}.click()", words, index)

    def fill(self, **values: Any) -> None:
        script = "for (const [n, v] of Object.entries(arguments[0])) document.querySelector(`[name=${n}]`).value = v"
        self.run(script, values)

    def stored(self) -> list[Any]:
        return self.run("return Object.keys(localStorage).sort().map((k) => [k, localStorage[k]])")

    @property
    def asked(self) -> list[Request]:
        """The user's requests: the gateway asks for one token after one, to see whether the server is ready."""
        return [request for request in self.triton.requests if len(request.prompt) > 1]

    def prompt(self, index: int = -1) -> str:
        return bytes(token - 3 for token in self.asked[index].prompt).decode()


@pytest.fixture
def page(browser: Browser, url: str, triton: FakeTriton) -> Page:
    made = Page(browser, url, triton)
    made.begin()
    return made


def test_markup_is_text(page: Page) -> None:
    page.answered(HOSTILE.replace("😀", ""), HOSTILE)
    assert page.said("user") == [HOSTILE.replace("😀", "")] and page.said("assistant") == [HOSTILE]
    assert page.run("return window.hit ?? document.querySelectorAll('#log img, #log script, #bold').length") == 0
    page.answered("And?", "fine")
    assert page.said("assistant")[1:] == ["fine"]
    assert page.prompt() == f"[user]{HOSTILE.replace('😀', '')}[assistant]{HOSTILE}[user]And?[assistant]"
    assert page.console() == []


def test_markup_of_a_hostile_answer_does_nothing(page: Page) -> None:
    page.answered("x", XSS)
    tags = set(page.all("#log .said *", "e.localName"))
    assert {"table", "figure", "blockquote"} < tags <= set(TAGS.split())
    names = {name for names in page.all("#log .said *", "e.getAttributeNames()") for name in names}
    assert names <= {"class", "href", "rel", "target", "type", "tabindex", "role", "aria-label"}
    links = page.all("#log .said a", "[e.protocol, e.host, e.rel]")
    assert links == [["https:", "e.org", "noopener noreferrer"]] * 4
    page.run("document.querySelectorAll('#log .said *').forEach((e) => e.localName !== 'a' && e.click())")
    assert page.run("return window.hit ?? 0") == 0
    text = page.text("#log .assistant .said")
    assert text.count("<script>window.hit=1</script>") == 6 and "[a](javascript:window.hit=1)" in text
    assert page.console() == []


def test_the_policy_stops_what_the_page_does_not_hold(page: Page) -> None:
    page.run("const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)")
    assert page.run("return window.hit ?? 0") == 0
    assert any("Content Security Policy" in message for message in page.console())


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# A *b* #\n####### C", "<h3>A <em>b</em></h3><p>####### C</p>"),
        ("**a *b* c** ***d*** a_b_c 2 * 3 \\*f*",
         "<p><strong>a <em>b</em> c</strong> <em><strong>d</strong></em> a_b_c 2 * 3 *f*</p>"),
        ("~~a~~ `` b`c `` `*d*` `e", "<p><del>a</del> <code>b`c</code> <code>*d*</code> `e</p>"),
        ("- a\n  - b\n\n    c\n- d", "<ul><li><p>a</p><ul><li><p>b</p><p>c</p></li></ul></li><li><p>d</p></li></ul>"),
        ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("> a\nb\n> - c\n\nd", "<blockquote><p>a\nb</p><ul><li><p>c</p></li></ul></blockquote><p>d</p>"),
        ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
        ("a\n|a|b|\n|:-:|-:|\n|`1\\|2`|",
         "<p>a</p><table><thead><tr><th>a</th><th>b</th></tr></thead>"
         "<tbody><tr><td><code>1|2</code></td><td></td></tr></tbody></table>"),
        ("x\n~~~py\n<b>\n```\n~~~\ny", "<p>x</p><pre><code>&lt;b&gt;\n```</code></pre><p>y</p>"),
        ("```\nopen", "<pre><code>open</code></pre>"),
        ("(https://e.org/x_y).", '<p>(<a href="https://e.org/x_y">https://e.org/x_y</a>).</p>'),
        ("[*a* b](<https://e.org/> 't') [c][d]", '<p><a href="https://e.org/"><em>a</em> b</a> [c][d]</p>'),
    ],
)  # fmt: skip
def test_markdown(page: Page, text: str, html: str) -> None:
    script = """return import("/page/markdown.js").then(({ showMarkdown }) => {
        const shown = ["", arguments[0]].map(() => document.createElement("div"));
        for (let end = 1; end < arguments[0].length; end += 1) showMarkdown(shown[0], arguments[0].slice(0, end));
        return shown.map((place) => {
            showMarkdown(place, arguments[0]);
            place.querySelectorAll("figcaption").forEach((e) => e.remove());
            place.querySelectorAll("figure, .wide").forEach((e) => e.replaceWith(e.firstChild));
            return place.innerHTML.replace(/ (target|rel|tabindex|role|aria-label)="[^"]*"/g, "");
        }); })"""
    assert page.run(script, text) == [html, html], "letter by letter, and at once"


@pytest.mark.parametrize(
    ("text", "selector", "most"),
    [
        ("*" * 20_000 + "a" + "*" * 20_000, "strong strong strong strong strong strong", 0),
        ("|a" * 2000 + "\n" + "|-" * 2000 + "\n" + "b|\n" * 2000, "td", 200_000),
    ],
)
def test_a_text_makes_no_more_elements_than_are_in_it(page: Page, text: str, selector: str, most: int) -> None:
    """Elements within each other end a browser's tab, and cells that no row has are the square of a text."""
    page.run(
        """return import("/page/markdown.js").then(({ showMarkdown }) => {
        showMarkdown(window.shown = document.createElement("div"), arguments[0]); })""",
        text,
    )
    assert page.run("return window.shown.querySelectorAll(arguments[0]).length", selector) <= most
    assert page.run("return window.shown.textContent.length") > 2000


def test_code_is_labelled_and_copied(page: Page) -> None:
    page.answered("x", "```python\nx = '<b>'\n```")
    assert page.text("figcaption span") == "python"
    page.run("window.copied = []; navigator.clipboard.writeText = async (text) => void window.copied.push(text)")
    page.press("Copy")
    page.wait(lambda: page.text("figcaption button") == "Copied", "the code to be copied")
    page.press("Copy")
    page.wait(lambda: page.run("return window.copied.length") == 2, "the answer to be copied")
    assert page.run("return window.copied") == ["x = '<b>'", "```python\nx = '<b>'\n```"]


def test_an_answer_grows_and_is_stopped_by_the_keyboard(page: Page) -> None:
    """It is laid out a few times a second at most."""
    page.triton.script = endless(pause_s=0.002)
    page.run("""window.changes = 0; window.begun = performance.now();
        const seen = new MutationObserver(() => (window.changes += 1));
        seen.observe(document.querySelector("#log"), {childList: true, characterData: true, subtree: true})""")
    page.ask("go on")
    page.wait(lambda: len("".join(page.said("assistant"))) > 500, "some of the answer")
    changes, passed_ms = page.run("return [window.changes, performance.now() - window.begun]")
    assert 2 < changes <= passed_ms / 250 + 2
    assert page.run("return document.querySelector('#log').getAttribute('aria-busy')") == "true"
    page.keys("escape")
    page.wait(lambda: page.idle(), "the end")
    page.wait(lambda: page.asked[-1].cancelled, "the server to be told")
    assert "stopped" in page.text("#log")


def test_a_text_is_completed(page: Page) -> None:
    page.say(" upon")
    page.click("#mode-complete")
    page.ask("Once")
    page.wait(lambda: page.said("completion") == ["Once upon"] and page.idle(), "the text")
    assert page.prompt() == "Once"
    assert page.asked[-1].value("request_output_len") == 1024, "a quarter of this context"
    page.click("#new")
    assert page.said("completion") == []


def test_errors_are_shown_and_pass(page: Page) -> None:
    async def broken(request):
        yield Row([100])
        await asyncio.sleep(0)

    page.triton.script = broken
    page.ask("x")
    page.wait(lambda: page.said("error"), "the error")
    assert "ended the answer before its end" in page.said("error")[0]
    page.say("fine")
    page.press("Send again")
    page.wait(lambda: page.said("assistant") == ["fine"] and page.idle(), "the answer")
    assert page.said("error") == [] and page.said("user") == ["x"]
    page.fill(temperature=-1)
    page.ask("y")
    page.wait(lambda: page.said("error"), "the refusal")
    assert "temperature" in page.said("error")[0] and page.said("user") == ["x", "y"]
    page.fill(temperature="")
    page.press("Send again")
    page.wait(lambda: page.said("assistant") == ["fine", "fine"], "the answer")


def test_a_key_is_asked_for(page: Page, start: Callable[..., str], monkeypatch) -> None:
    monkeypatch.setenv("KVFORGE_API_KEY", "secret")
    page.browser.open(start())
    page.wait(lambda: page.run("return !document.querySelector('#key-form').hidden"), "the question")
    page.type("#key", "wrong")
    page.keys("enter")
    page.wait(lambda: "does not take" in page.text("#key-note"), "the refusal")
    page.run("document.querySelector('#key').value = ''")
    page.type("#key", "secret")
    page.keys("enter")
    page.wait(lambda: page.text("#model") == "tiny", "the model's name")
    page.answered("x")
    assert page.said("assistant") == ["hello"] and "secret" not in json.dumps(page.stored())


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 390)])
def test_a_narrow_screen(page: Page, scheme: str, width: int) -> None:
    """Nothing is wider than the screen; text and ground differ in either scheme."""
    wide = "`" + "word" * 200 + "`\n\n|" + "wide|" * 60 + "\n|" + "-|" * 60 + "\n\n```\n" + "code" * 100 + "\n```"
    page.browser.prefer(scheme)
    page.answered("x" * 300, wide)
    page.browser.resize(width, 740)
    page.run("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    assert page.all("html, #log, .said", "e.scrollWidth - e.clientWidth") == [0] * 4
    ground, ink = page.run("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
    light, dark = (ground, ink) if scheme == "light" else (ink, ground)
    assert sum(_rgb(light)) > 600 and sum(_rgb(dark)) < 120


def _rgb(color: str) -> list[int]:
    return [int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")]


def test_conversations_outlive_a_reload(page: Page) -> None:
    page.answered("First", "**one**")
    page.browser.reload()
    page.wait(lambda: page.all("#log strong") == ["one"], "the conversation")
    page.click("#new")
    page.answered("Second")
    assert page.prompt() == "[user]Second[assistant]"
    page.run("document.querySelector('#title').select()")
    page.type("#title", "Renamed")
    page.keys("enter")
    assert page.all("#list button") == ["Renamed", "First"]
    page.press("First")
    assert page.said("user") == ["First"]
    page.click("#delete")
    assert page.all("#list button") == ["Renamed", "First"], "the first click asks"
    page.click("#delete")
    page.open()
    assert page.all("#list button") == ["Renamed"] and len(page.stored()) == 1 and page.said("user") == []


def test_nothing_is_kept_where_nobody_wants_it(page: Page) -> None:
    page.answered("x")
    assert len(page.stored()) == 1
    page.click("#keep")
    page.answered("more")
    assert page.stored() == [["kvforge.keep", "no"]]
    page.browser.reload()
    page.wait(lambda: page.text("#model") == "tiny", "the model's name")
    assert page.said("user") == page.all("#list button") == []
    assert not page.run("return document.querySelector('#keep').checked")


@pytest.mark.parametrize("broken", ["{", "[]", '{"id": "a", "title": "", "at": 1, "settings": {}, "entries": [{}]}'])
def test_broken_stored_data_is_said_and_left(page: Page, broken: str) -> None:
    page.run("localStorage['kvforge.conversation.a'] = arguments[0]", broken)
    page.open()
    assert "cannot be read" in page.text("#shelf-note")
    page.answered("x")
    assert page.said("assistant") == ["hello"] and ["kvforge.conversation.a", broken] in page.stored()
    assert page.console() == []


def test_a_full_storage_or_none_is_said(page: Page) -> None:
    for name in ("a", "b"):
        script = "for (let n = 1 << 22; n; n >>= 1) try { localStorage[arguments[0] + n] = 'x'.repeat(n) } catch {}"
        page.run(script, name)
    page.answered("x")
    assert page.said("assistant") == ["hello"] and "storage is full" in page.text("#shelf-note")
    source = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('forbidden') }})"
    added = page.browser.devtools("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    page.open()
    page.answered("x")
    assert page.said("assistant") == ["hello"] and page.console() == []
    assert not page.run("return document.querySelector('#keep').checked")
    page.browser.devtools("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_message_is_edited_and_an_answer_made_anew(page: Page) -> None:
    page.answered("First", "one")
    page.answered("Second")
    page.say("two")
    page.press("Regenerate", 1)
    page.wait(lambda: page.said("assistant") == ["one", "two"] and page.idle(), "the new answer")
    assert page.prompt() == page.prompt(-2) == "[user]First[assistant]one[user]Second[assistant]"
    for key, left in (("escape", ["First", "Second"]), ("enter", ["First!"])):
        page.press("Edit")
        page.type(".edit textarea", "!")
        page.keys(key)
        page.wait(lambda left=left: page.said("user") == left and page.idle(), "the messages")
    assert page.said("assistant") == ["two"] and page.prompt() == "[user]First![assistant]"


def test_exports(page: Page, tmp_path: Path) -> None:
    page.answered("Say it", "A `b`")
    page.browser.devtools("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.click("#export-json")
    page.click("#export-markdown")
    page.wait(lambda: {"Say-it.json", "Say-it.md"} <= {path.name for path in tmp_path.iterdir()}, "two files")
    told = json.loads((tmp_path / "Say-it.json").read_text())
    assert told["messages"] == [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "A `b`"}]
    assert told["model"] == "tiny" and told["settings"]["max_tokens"] == "1024"
    assert (tmp_path / "Say-it.md").read_text().startswith("# Say it\n\n## You\n\nSay it\n\n## Model\n\nA `b`\n\n*")


def test_settings_are_sent_and_wrong_ones_said_before(page: Page) -> None:
    page.fill(schema="{", system="Be brief")
    page.ask("x")
    page.wait(lambda: "JSON schema of the answer" in page.text("#talk-note"), "the refusal")
    assert page.asked == [] and page.run("return document.activeElement.name") == "schema"
    assert page.run("return document.querySelector('#text').value") == "x", "what was typed is not lost"
    sent = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 0.5}
    sent |= {"frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 2**53 - 1, "max_tokens": 9}
    page.fill(**sent, schema='{"type": "integer"}', stop="a\nb c")
    page.answered("y")
    (request,) = page.asked
    names = {"top_p": "runtime_top_p", "top_k": "runtime_top_k", "max_tokens": "request_output_len"}
    assert {name: request.value(names.get(name, name)) for name in sent} == sent
    assert json.loads(request.texts("guided_decoding_guide")[0]) == {"type": "integer"}
    assert page.prompt() == "[system]Be brief[user]xy[assistant]"


def test_tools_are_called_and_answered(page: Page, url_of_template: str) -> None:
    page.url = url_of_template
    page.begin()
    page.say('<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call> ', "stop")
    schema = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "x"}}}}
    page.fill(tools=json.dumps([{"type": "function", "function": {"name": "f", "parameters": schema}}]))
    page.ask("Weather?")
    page.wait(lambda: page.all(".results"), "the question for a result")
    page.browser.reload()
    page.wait(lambda: page.all(".results"), "the question after a reload")
    assert page.text("#log .assistant .note").endswith(' · left to the model: {"f": ["not"]}')
    assert page.text(".call") == 'f({\n  "city": "Rome"\n})'
    page.say("Sunny. ", "stop")
    page.type(".results textarea", "25 degrees")
    page.keys("enter")
    page.wait(lambda: page.said("assistant")[-1:] == ["Sunny."], "the answer")
    assert "[user]Weather?" in page.prompt() and "<tool_call>f:city=Rome[tool]25 degreescall_" in page.prompt()
    assert page.said("tool") == ["25 degrees"] and "Result of f" in page.text("#log .tool")


def test_reasoning_is_folded(page: Page, start: Callable[..., str]) -> None:
    page.url = start(reasoning_format="think")
    page.begin()
    page.answered("x", "<think>\nHm <b>\n</think>\n\nYes")
    assert page.said("assistant") == ["Yes"] and page.text("#log .assistant .thought .plain").strip() == "Hm <b>"
    assert not page.run("return document.querySelector('#log .assistant details').open")


def test_figures_are_the_answers(page: Page) -> None:
    async def script(request):
        yield Row([100] * 4)
        await asyncio.sleep(0.05)
        yield Row([101] * 6, finish_reason="length")

    page.triton.script = script
    page.answered("x")
    tokens, first, rate, cut = page.text("#log .assistant .note").split(" · ")
    assert tokens == f"{len(page.asked[0].prompt)} tokens in, 10 out" and cut == "cut off at max tokens"
    assert first.startswith("time to first token ") and rate.endswith(" tokens/s")
    script = "return import('/page/figures.js').then(({ summary }) => summary(arguments[0]))"
    usage = {"prompt_tokens": 7, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 5}}
    times = {"asked": 100, "first": 350, "last": 1850, "firstTokens": 4, "tokens": 10, "usage": usage, "reason": "stop"}
    assert page.run(script, times) == "7 tokens in (5 cached), 10 out · time to first token 0.250 s · 4 tokens/s"


def test_roles_names_and_the_keyboard(page: Page) -> None:
    page.answered("x", "# T\n\n|a|\n|-|\n\n```\nx\n```")
    page.run("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    named = page.browser.named()
    assert {("log", "Conversation"), ("navigation", "Conversations"), ("heading", "T")} < set(named)
    assert {("article", "Model"), ("group", "Code"), ("group", "Table")} < set(named)
    acting = {"button", "textbox", "spinbutton", "checkbox", "radio", "link", "DisclosureTriangle", "region"}
    assert len([role for role, _ in named if role == "textbox"]) >= 6
    assert [role for role, name in named if role in acting and not name.strip()] == []
    page.type("#text", "a")
    page.keys("shift", "enter")
    page.type("#text", "b")
    assert page.run("return document.querySelector('#text').value") == "a\nb"
    page.press("Regenerate")
    assert page.run("return document.activeElement.id") == "text", "the button that had the focus is gone"
    page.wait(lambda: page.idle(), "the answer")
    page.run("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    seen = set()
    for _ in range(60):
        page.keys("tab")
        seen.add(page.run("const e = document.activeElement; return e.id || e.name || e.textContent"))
        look = "const e = document.querySelector(':focus'); return e ? getComputedStyle(e).outlineStyle : 'no focus'"
        assert page.run(look) != "none"
    assert {"new", "keep", "title", "log", "text", "send", "top_p", "tools", "Copy", "Regenerate", "Edit"} <= seen
