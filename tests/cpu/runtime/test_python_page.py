"""The programs of docs/python.md, as they stand there."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from tests.support.models.chat import with_chat_template
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.pages import ROOT, shell_lines

PAGE = ROOT / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def engine(engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(engines.engine(SWIFTKV), tmp_path_factory.mktemp("page") / "engine")


def test_the_short_programs_run(engine: Path, capsys) -> None:
    names: dict = {}
    for block in BLOCKS[:3]:
        exec(compile(block.replace('"ENGINE"', f'"{engine}", kv_cache_gib=0.1'), "python.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) > 60


def test_the_web_application_starts_as_printed(engine: Path, tmp_path: Path) -> None:
    """The two lines under it, with the engine's path in place of the page's and a free port."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (tmp_path / "app.py").write_text(next(block for block in BLOCKS if "FastAPI" in block))
    lines = [line.strip() for line in shell_lines(PAGE.read_text(encoding="utf-8"))]
    start, ask = (line for line in lines if "uvicorn" in line or line.startswith("curl"))
    start = start.replace("engines/teacher", shlex.quote(str(engine))).replace("uvicorn", "exec uvicorn")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "log").open("w") as log:
        command = ["bash", "-c", f"{start} --port 0"]
        server = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        )
    try:
        deadline, found = time.monotonic() + 120, None
        while found is None and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            found = re.search(r"running on http://[\d.]+:(\d+)", (tmp_path / "log").read_text())
        assert found is not None, (tmp_path / "log").read_text()
        asked = subprocess.run(
            ask.replace("localhost:8000", f"127.0.0.1:{found[1]}").replace("curl", "curl -sS --fail", 1),
            shell=True,
            capture_output=True,
        )
        assert asked.returncode == 0 and asked.stdout, asked.stderr
    finally:
        server.terminate()
        server.wait()


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
