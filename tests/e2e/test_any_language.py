"""Engines in folders of any name and texts in any language, whatever the locale: generated, and served at each door."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import generate
from tests.support.serving.serve_process import ServeProcess
from tests.support.serving.server import ask

TEXT = "Grüße, 你好 🙂 שלום"
GUIDE = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": TEXT}
LOCALES = ("LC_", "LANG", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE")
READ_ONLY = "länk to a folder that is read alone"
CASES = [("mödels 日本", {}), ("sp ace \"q\" 'a' $(id);", {"LC_ALL": "C"}), (READ_ONLY, {"LANG": "C.UTF-8"})]


@pytest.fixture
def served_folder(request: pytest.FixtureRequest, engine_dir: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the engine in a folder of this name; or a link to one on which nothing can be written."""
    name: str = request.param
    engine = tmp_path / name
    if name != READ_ONLY:
        shutil.copytree(engine_dir, engine)
        yield engine
        return
    folder = tmp_path / "schreibgeschützt"
    shutil.copytree(engine_dir, folder)
    engine.symlink_to(folder)
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", str(folder), str(folder)], capture_output=True)
    if mounted.returncode:
        for path in (*folder.rglob("*"), folder):  # for all but root
            path.chmod(0o555 if path.is_dir() else 0o444)
    yield engine
    if mounted.returncode:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
    else:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("served_folder", "locale"), CASES, indirect=["served_folder"])
def test_a_folder_and_a_locale(served_folder: Path, locale: dict[str, str]) -> None:
    """The prompt and the answer, which a guide forces, are beyond ASCII."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LOCALES)} | locale
    command = [sys.executable, "-m", "kvforge", "generate", str(served_folder), "--prompt", TEXT, "--regex", TEXT]
    offline = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert offline.stdout.decode().strip() == TEXT
    options = ("--openai", "--openai-port", "0", "--served-model-name", TEXT)
    with ServeProcess(served_folder, *options, env=environment) as running:
        inputs = {"text_input": TEXT, "max_tokens": 100, **GUIDE}
        assert generate(running.http_url, "ensemble", inputs)["text_output"] == TEXT
        with StreamingClient(running.grpc_url) as client:
            pieces = client.generate("ensemble", ask("ensemble", TEXT, 100, **GUIDE))
            assert "".join(response.text for response in pieces) == TEXT
        body = {"model": TEXT, "prompt": TEXT, "max_tokens": 100, "guided_regex": TEXT}
        request = urllib.request.Request(
            f"{running.openai_url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["choices"][0]["text"] == TEXT
