"""The programs of docs/python.md, as they stand there."""

import re
import runpy
import threading
from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from tests.support.models.chat import with_chat_template
from tests.support.models.engines import SWIFTKV, EngineShelf

PAGE = Path(__file__).resolve().parents[3] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def engine(engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(engines.engine(SWIFTKV), tmp_path_factory.mktemp("page") / "engine")


def test_the_short_programs_run(engine: Path, capsys) -> None:
    names: dict = {}
    for block in BLOCKS[:3]:
        exec(compile(block.replace('"ENGINE"', f'"{engine}", kv_cache_gib=0.1'), "python.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) > 60


def test_the_web_application(engine: Path, tmp_path: Path, monkeypatch) -> None:
    testclient = pytest.importorskip("fastapi.testclient", exc_type=ImportError)
    monkeypatch.setenv("ENGINE", str(engine))
    (tmp_path / "app.py").write_text(next(block for block in BLOCKS if "FastAPI" in block))
    app = runpy.run_path(str(tmp_path / "app.py"))["app"]
    prompts = ["Hello", "naïve 😀", "The quick brown fox"]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    expected = [r.outputs[0].text for r in LLM(engine, kv_cache_gib=0.1).generate(prompts, params, use_tqdm=False)]
    found: dict[str, str] = {}
    with testclient.TestClient(app) as client:

        def ask(prompt: str) -> None:
            found[prompt] = client.post("/answer", params={"prompt": prompt, "max_tokens": 24}).text

        callers = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        refused = client.post("/answer", params={"prompt": "x" * 600})
        assert client.portal is not None
        stats = client.portal.call(app.state.llm.stats)
    assert [found[prompt] for prompt in prompts] == expected
    assert refused.status_code == 400 and refused.json()["detail"].startswith("the prompt has 600 tokens")
    assert (stats["num_running"], stats["num_used_pages"]) == (0, 0)
    assert not any(thread.name == "engine" for thread in threading.enumerate())
