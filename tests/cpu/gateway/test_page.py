"""The page over HTTP: what its files may do, who gets them, and the numbers that it shows."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvforge.cli import main
from kvforge.common.sampling_fields import DEFAULT_FIELDS
from kvforge.gateway.http.page.static_files import FOLDER
from tests.cpu.gateway.http_calls import call

FILES = {path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg")}
NAMES = sorted({"/"} | {f"/page/{path.name}" for path in FILES if path.name != "index.html"})
NUMBERS = """\
# HELP kvforge_generated_tokens_total Tokens
# TYPE kvforge_generated_tokens_total counter
kvforge_generated_tokens_total{model="tensorrt_llm"} 5
nv_trt_llm_general_metrics{a="b"} 1
"""


class Metrics(HTTPServer):
    """Gives NUMBERS among others, and counts who asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/metrics"


class Answer(BaseHTTPRequestHandler):
    server: Metrics

    def do_GET(self) -> None:
        self.server.num_asked += 1
        data = f"# TYPE x gauge\nnv_cpu_utilization 0.5\n{NUMBERS}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with Metrics() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


@pytest.mark.parametrize("path", NAMES)
def test_files_are_whole_and_bound_by_a_policy(url: str, path: str) -> None:
    answer = call(url, "GET", path)
    name = "index.html" if path == "/" else path.removeprefix("/page/")
    assert answer.status == 200 and answer.body == (FOLDER / name).read_text(encoding="utf-8")
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'self'" and {"base-uri 'none'", "frame-ancestors 'none'"} < set(policy)
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    kind = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kind[Path(name).suffix])
    assert call(url, "HEAD", path).status == 200


def test_headers_do_not_grow(start: Callable[..., str]) -> None:
    url = start(cors_origin="https://example.org")
    asked = [call(url, "GET", "/", headers={"Origin": "https://example.org"}).headers for _ in range(3)]
    assert asked[0]["vary"] == asked[2]["vary"] == "Origin"


def test_files_name_no_other_host_and_put_text_in_place_as_text_only() -> None:
    assert len(FILES) >= 6
    for path in FILES:
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|[\"'(]//|\bimport\(|@import|url\(", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text), path
        assert not re.search(r"sessionStorage|indexedDB|document\.cookie", text), path
        assert path.name == "store.js" or "localStorage" not in text, path
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", html)


def test_what_the_page_names_is_there(url: str) -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="([^"]+)"', html)
    named += [f"page/{name}" for path in FILES for name in re.findall(r'from "\./([^"]+)"', path.read_text())]
    assert {f"/{path}" for path in named} | {"/"} == set(NAMES)
    ids = set(re.findall(r'\sid="([^"]+)"', html))
    for path in FILES:
        assert set(re.findall(r'byId\("([^"]+)"\)', path.read_text())) <= ids
    assert set(re.findall(r'\sfor="([^"]+)"', html)) <= ids, "a label without a field"


def test_the_page_leaves_the_temperature_to_the_server() -> None:
    """An empty field is not sent; what the model's own files say of it is shown in it."""
    html, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("index.html", "settings.js"))
    (field,) = re.findall(r'<input id="temperature"[^>]*>', html)
    assert "value=" not in field and "field.placeholder = facts.sampling[field.name]" in script


def test_no_page(start: Callable[..., str]) -> None:
    url = start(no_page=True, metrics="http://127.0.0.1:9/metrics")
    for path in (*NAMES, "/page/model", "/page/metrics"):
        assert call(url, "GET", path).status == 404
    assert call(url, "GET", "/v1/models").status == 200


def test_paths_beside_the_files_are_not_found(url: str) -> None:
    for path in ("/page/", "/page/static_files.py", "/page/../app.py", "/page/%2e%2e/app.py", "/page/index.html"):
        assert call(url, "GET", path).status == 404


def test_a_key_is_for_what_the_page_asks_not_for_the_page(start: Callable[..., str], metrics, monkeypatch) -> None:
    monkeypatch.setenv("KVFORGE_API_KEY", "secret")
    url = start(metrics=metrics.url)
    for path in NAMES:
        assert call(url, "GET", path).status == 200
    for path in ("/page/model", "/page/metrics"):
        assert call(url, "GET", path).status == 401
        assert call(url, "GET", path, headers={"Authorization": "Bearer secret"}).status == 200


def test_what_the_page_is_told(url: str, start: Callable[..., str], metrics: Metrics) -> None:
    facts = {"model": "tiny", "chat": True, "max_model_len": 4096, "metrics": False}
    told = json.loads(call(url, "GET", "/page/model").body)
    sampling = told.pop("sampling")
    assert told == facts and sampling["temperature"] == 1.0 and set(sampling) == set(DEFAULT_FIELDS)
    facts["sampling"] = sampling
    watching = start(metrics=metrics.url)
    assert json.loads(call(watching, "GET", "/page/model").body) == {**facts, "metrics": True}


def test_numbers_are_the_engines_and_asked_for_once(url: str, start: Callable[..., str], metrics, monkeypatch) -> None:
    monkeypatch.setattr("kvforge.gateway.http.page.engine_numbers.HELD_S", 600.0)
    watching = start(metrics=metrics.url)
    assert [call(watching, "GET", "/page/metrics").body for _ in range(3)] == [NUMBERS] * 3
    assert metrics.num_asked == 1
    assert "page/metrics" not in call(watching, "GET", "/metrics").body, "it would be most of what is counted"
    unknown = call(url, "GET", "/page/metrics")
    assert unknown.status == 404 and "--metrics" in unknown.body
    assert call(start(metrics="http://127.0.0.1:9/metrics"), "GET", "/page/metrics").status == 503


def test_one_port_has_all_metrics(url: str, start: Callable[..., str], metrics: Metrics) -> None:
    """Prometheus' own parser reads them; where the engine gives none, the gateway's are there, and why."""
    found = {
        one.name: one
        for one in text_string_to_metric_families(call(start(metrics=metrics.url), "GET", "/metrics").body)
    }
    tokens = found["kvforge_generated_tokens"]
    assert (tokens.type, tokens.documentation, tokens.samples[0].value) == ("counter", "Tokens", 5)
    assert {"nv_trt_llm_general_metrics", "kvforge_gateway_open_requests"} <= found.keys()
    assert "nv_cpu_utilization" not in found
    for alone, why in ((url, "--metrics URL"), (start(metrics="http://127.0.0.1:9/metrics"), "gives no metrics")):
        answer = call(alone, "GET", "/metrics")
        assert answer.status == 200 and why in answer.body
        assert {one.name.split("_")[1] for one in text_string_to_metric_families(answer.body)} == {"gateway"}


def test_metrics_wait_for_no_server_that_does_not_end_its_answer(start: Callable[..., str], monkeypatch) -> None:
    monkeypatch.setattr("kvforge.gateway.http.page.engine_numbers.TIMEOUT_S", 0.3)
    monkeypatch.setattr("kvforge.gateway.http.page.engine_numbers.HELD_S", 600.0)
    asked, over = [], threading.Event()

    class Trickling(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            while not over.wait(0.1):
                self.wfile.write(b"#")

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Trickling) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        watching = start(metrics=f"http://127.0.0.1:{server.server_port}/metrics")
        try:
            answers = [call(watching, "GET", "/metrics") for _ in range(3)]
        finally:
            over.set()
            server.shutdown()
    assert all(answer.status == 200 and "gives no metrics" in answer.body for answer in answers)
    assert len(asked) == 1, "what failed is held as an answer is"


def test_no_page_is_for_the_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--no-openai", "--no-page"]) == 1
    assert capsys.readouterr().err == (
        "kvforge: error: --no-page is for the OpenAI gateway: leave out --no-openai, or leave it out\n"
    )
