"""Public agents finish a task of three calls and an answer, with a model that is told what to say.

The agents run where their packages are, apart from those of the tests::

    python -m venv agents && agents/bin/pip install openai-agents langchain langchain-openai mcp
    KVFORGE_AGENTS_PYTHON=agents/bin/python pytest tests/cpu/gateway/test_agents.py tests/e2e/test_agents.py
"""

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton, Request, Row, bytes_of
from tests.support.clients.agents.programs import PROGRAMS, PYTHON, REASON, run_agent
from tests.support.clients.battery import TEMPLATE

CALLS = [["add", {"a": 1, "b": 2}], ["multiply", {"a": 3, "b": 4}], ["record", {"value": 12}]]


@pytest.fixture(scope="module")
def url(start_shared: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("agents")
    (folder / "template.jinja").write_text(TEMPLATE)
    engine = write_engine_files(folder / "tiny", max_seq_len=1 << 16)
    return start_shared(engine=engine, chat_template=folder / "template.jinja", tool_call_format="hermes")


def model(request: Request) -> AsyncIterator[Row]:
    """One that reads its tools' results in the prompt and goes on from the last of them."""
    prompt = bytes(token - 3 for token in request.prompt).decode()
    results = re.findall(r"\[tool\][a-z ]*(\d+)", prompt)
    if len(results) == len(CALLS):
        return bytes_of(f"The answer is {results[-1]}. ", request, "stop")
    name, arguments = CALLS[len(results)]
    if results:
        arguments = {**arguments, next(iter(arguments)): int(results[-1])}
    call = json.dumps({"name": name, "arguments": arguments})
    return bytes_of(f"Let me see.\n<tool_call>\n{call}\n</tool_call> ", request, "stop")


@pytest.mark.skipif(PYTHON is None, reason=REASON)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_task_of_three_steps(url: str, triton: FakeTriton, program: str) -> None:
    triton.script = model
    said = run_agent(program, url, "auto")
    assert said["answers"] == ["The answer is 12."] * PROGRAMS[program], said
    assert said["calls"] == CALLS * PROGRAMS[program]
    assert len(triton.requests) == 4 * PROGRAMS[program]
    guided = [bool(request.texts("guided_decoding_guide_type")) for request in triton.requests]
    assert all(guided), "tools come with a guide, also where the model may choose"
