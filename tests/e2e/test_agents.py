"""Public agents finish a task of three calls and an answer at a served engine whose guides write the calls: the model's
weights are random. Where their packages come from: tests/cpu/gateway/test_agents.py."""

from pathlib import Path

import pytest

from kvforge.serving.server.launcher import TritonServer
from tests.support.clients.agents.programs import PROGRAMS, PYTHON, REASON, run_agent
from tests.support.clients.battery import TEMPLATE
from tests.support.serving.gateway_process import run_gateway

LIMITS = {"add": {"a": 9, "b": 9}, "multiply": {"a": 9999, "b": 9}, "record": {"value": 9999}}


@pytest.mark.skipif(PYTHON is None, reason=REASON)
@pytest.mark.parametrize("program", PROGRAMS)
def test_guides_write_what_an_agent_can_run(server: TritonServer, tmp_path: Path, program: str) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    with run_gateway(
        server, tmp_path, chat_template=tmp_path / "template.jinja", tool_call_format="hermes", exit_with_parent=True
    ) as gateway:
        said = run_agent(program, gateway.url, "forced")
    assert len(said["calls"]) == 3 * PROGRAMS[program] and len(said["answers"]) == PROGRAMS[program], said
    for name, arguments in said["calls"]:
        assert arguments.keys() == LIMITS[name].keys()
        assert all(0 <= value <= LIMITS[name][member] for member, value in arguments.items())
