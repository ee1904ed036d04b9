"""docs/security.md says of everything that a client controls what its bound is."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from kvforge.gateway.requests.messages.fields import COUNTED, KNOWN
from kvforge.gateway.requests.request_fields import CHAT, COMPLETIONS
from kvforge.gateway.requests.token_requests import DETOKENIZE, TOKENIZE
from kvforge.serving.contract.parameters import (
    ERRORS_AS_TENSORS,
    KEEP_END_TOKEN,
    STOP_TOKEN_IDS,
    STREAM_INTERVAL,
    TIMEOUT,
)
from kvforge.serving.server.options import ServerOptions
from kvforge.serving.server.repository import materialise

ROOT = Path(__file__).resolve().parents[3]
CONTRACT = json.loads((ROOT / "tests/cpu/serving/contract/triton_contract.json").read_text())


def first_cells(page: str) -> list[str]:
    section = page.partition("## What a client controls")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert all(line.count(" | ") == 2 and line.endswith(" |") for line in rows), "three cells in every row"
    return [line.split(" | ")[0] for line in rows]


CELLS = first_cells((ROOT / "docs/security.md").read_text(encoding="utf-8"))
AT_TRITON = {name for cell in CELLS for name in re.findall(r"`(\w+)`(?! \(g\))", cell)}
AT_GATEWAY = {name for cell in CELLS for name in re.findall(r"`(\w+)`", cell)}


def triton_inputs() -> set[str]:
    """Of all models, from their configurations, and those of the contract."""
    found = {tensor["name"] for name in ("tensorrt_llm", "ensemble") for tensor in CONTRACT["models"][name]["inputs"]}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "models"
        materialise(target, Path("/engine"), 1, ServerOptions())
        for path in target.glob("*/config.pbtxt"):
            config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
            found |= {tensor.name for tensor in config.input}
    return found


@pytest.mark.parametrize("name", sorted(triton_inputs()))
def test_every_tensor_has_a_row(name: str) -> None:
    assert name in AT_TRITON


@pytest.mark.parametrize("name", sorted(COMPLETIONS | CHAT | KNOWN | COUNTED | TOKENIZE | DETOKENIZE))
def test_every_field_of_the_gateway_has_a_row(name: str) -> None:
    assert name in AT_GATEWAY


@pytest.mark.parametrize("name", [TIMEOUT, ERRORS_AS_TENSORS, STOP_TOKEN_IDS, STREAM_INTERVAL, KEEP_END_TOKEN])
def test_every_request_parameter_has_a_row(name: str) -> None:
    assert name in AT_TRITON


def test_a_name_without_a_row_is_noticed() -> None:
    assert "no_such_input" not in AT_TRITON | AT_GATEWAY and len(AT_TRITON) > 80
