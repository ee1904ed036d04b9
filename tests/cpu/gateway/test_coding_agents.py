"""Coding agents of the command line finish a task of three commands and an answer; the model is told what to say.

They run where they are installed, in a home and a folder of the test's own::

    npm install --prefix agents @openai/codex @qwen-code/qwen-code opencode-ai @continuedev/cli cline
    KVFORGE_CODING_AGENTS=agents/node_modules/.bin pytest tests/cpu/gateway/test_coding_agents.py
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton, Request, Row, bytes_of
from tests.support.clients.battery import TEMPLATE

FOLDER = os.environ.get("KVFORGE_CODING_AGENTS")
REASON = "needs coding agents; set KVFORGE_CODING_AGENTS to the folder of their programs"
TASK = "Say hi three times."
COMMAND = "echo hi"
TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "codex": ("exec_command", {"cmd": COMMAND}),
    "qwen": ("run_shell_command", {"command": COMMAND, "description": "d", "is_background": False}),
    "opencode": ("bash", {"command": COMMAND, "description": "d"}),
    "cn": ("Bash", {"command": COMMAND}),
    "cline": ("run_commands", {"commands": [COMMAND]}),
}
"""The tool of each program that runs a command, and what it is called with."""
NUM_CALLS = 3


@pytest.fixture(scope="module")
def url(start_shared: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("coding")
    (folder / "template.jinja").write_text(TEMPLATE)
    engine = write_engine_files(folder / "tiny", max_seq_len=1 << 18)
    return start_shared(engine=engine, chat_template=folder / "template.jinja", tool_call_format="hermes")


def commands(program: str, url: str, home: Path) -> list[list[str]]:
    """How the program is told of a server and asked; `home` gets the files that it wants."""
    if program == "codex":
        provider = f'model_providers.kv={{name="kv",base_url="{url}",wire_api="responses",env_key="OPENAI_API_KEY"}}'
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=kv"]
        return [["exec", *flags, "-c", provider, "-m", "tiny", TASK]]
    if program == "qwen":
        flags = ["--auth-type", "openai", "--openai-base-url", url, "--openai-api-key", "none", "-m", "tiny"]
        return [[*flags, "--yolo", "-p", TASK]]
    if program == "opencode":
        options = {"baseURL": url, "apiKey": "none"}
        own = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"tiny": {"name": "tiny"}}}
        (home / "opencode.json").write_text(json.dumps({"provider": {"kv": own}}))
        return [["run", "-m", "kv/tiny", TASK]]
    if program == "cn":
        model = {"name": "tiny", "provider": "openai", "model": "tiny", "apiKey": "none", "apiBase": url}
        config = {"name": "kv", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
        (home / "continue.yaml").write_text(json.dumps(config))  # JSON is YAML
        return [["-p", "--config", str(home / "continue.yaml"), "--auto", TASK]]
    server = ["-k", "none", "-m", "tiny"]
    return [["auth", "-p", "openai-compatible", *server, "-b", url], ["-P", "openai-compatible", *server, TASK]]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home of the test's own. What a program has left running there (cline a server) is ended."""
    yield tmp_path
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(tmp_path) in process.joinpath("cmdline").read_text(errors="replace").split("\0"):
                os.kill(int(process.name), signal.SIGTERM)


@pytest.mark.skipif(FOLDER is None, reason=REASON)
@pytest.mark.parametrize("program", TOOLS)
def test_a_task_of_three_commands(url: str, triton: FakeTriton, home: Path, program: str) -> None:
    name, arguments = TOOLS[program]
    said: list[str] = []

    def model(request: Request) -> AsyncIterator[Row]:
        prompt = bytes(token - 3 for token in request.prompt).decode()
        results = prompt.count("[tool]")
        if f'"name": "{name}"' not in prompt or results == NUM_CALLS:
            said.append("answer")
            return bytes_of(f"All done after {results} calls. ", request, "stop")
        call = json.dumps({"name": name, "arguments": arguments})
        said.append(name)
        return bytes_of(f"<tool_call>\n{call}\n</tool_call> ", request, "stop")

    triton.script = model
    path = Path(FOLDER or "") / program
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PWD": str(home), "OPENAI_API_KEY": "none"}
    for command in commands(program, f"{url}/v1", home):
        done = subprocess.run(
            [str(path.absolute()), *command], cwd=home, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    assert "All done after 3 calls." in done.stdout, done.stdout[-1000:]
    assert said.count(name) == NUM_CALLS, said
