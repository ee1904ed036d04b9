"""The model `preprocessing`: it reads no parameter of its own, so that those of the engine are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvforge.serving.contract.parameters import OWN, WITHOUT_EFFECT
from kvforge.serving.text_models.preprocess_server import PreprocessingServer
from tests.cpu.serving.text_models.test_bls import Sender, Triton
from tests.support.models.checkpoints import write_byte_tokenizer


@pytest.mark.parametrize("name", [*sorted(OWN), *WITHOUT_EFFECT, "timeout"])
def test_parameters(tmp_path: Path, name: str) -> None:
    write_byte_tokenizer(tmp_path)
    config = {"input": [{"name": "QUERY"}], "parameters": {"tokenizer_dir": {"string_value": str(tmp_path)}}}
    server = PreprocessingServer(Triton(None), {"model_config": json.dumps(config)})
    sender = Sender()
    request = SimpleNamespace(
        inputs={"QUERY": np.array([[b"Hi"]], object)}, get_response_sender=lambda: sender, request_id=lambda: "mine",
        parameters=lambda: json.dumps({name: 1}),
    )  # fmt: skip
    server.execute([request])
    server.close()
    ((response, _),) = sender.sent
    assert response.has_error() == (name in OWN)
    assert not response.has_error() or f"'{name}' is no input of this model" in response.error().message()
