"""The model `preprocessing`: it reads no parameter of its own, so that those of the engine are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvforge.serving.contract.parameters import OWN, WITHOUT_EFFECT
from kvforge.serving.text_models.preprocess_server import PreprocessingServer
from kvforge.serving.triton_config import TritonConfig
from tests.cpu.serving.text_models.test_bls import Sender, Triton
from tests.support.models.checkpoints import write_byte_tokenizer


@pytest.mark.parametrize("name", [*sorted(OWN), *WITHOUT_EFFECT, "timeout"])
def test_parameters(tmp_path: Path, name: str) -> None:
    write_byte_tokenizer(tmp_path)
    parameters = {name: {"string_value": str(tmp_path)} for name in ("tokenizer_dir", "run_dir")}
    config = {"input": [{"name": "QUERY"}], "max_batch_size": 1, "parameters": parameters}
    args = {"model_config": json.dumps(config), "model_name": "preprocessing", "model_version": "1"}
    server = PreprocessingServer(Triton(None), TritonConfig.of(args))
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
