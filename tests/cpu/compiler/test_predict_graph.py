"""The check of the graph that predicts a cache: what it writes and reads, before it is compiled."""

import dataclasses
from pathlib import Path

import pytest

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.errors import BuildError
from kvforge.compiler.build import open_prediction
from kvforge.compiler.export import export_predict
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import BuildOptions, resolve
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.prediction import random_predictor


def test_a_graph_that_does_something_else_is_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=3)
    predictor = random_predictor(tmp_path / "p", base, layers=(0, 1, 2), num_hidden_layers=3, hidden_size=32)
    config = read_model_config(open_model(base))
    plain = resolve(BuildOptions(dtype="float32", kv_dtype="int8"), config, "F32")
    _, prediction = open_prediction(predictor, config, plain)
    options = dataclasses.replace(plain, prediction=prediction)
    graph = export_predict(config, options)
    verify(graph, config, options)
    fewer = dataclasses.replace(options, prediction=dataclasses.replace(prediction, layers=(0, 1, 1)))
    with pytest.raises(BuildError, match=r"node|goes through"):
        verify(graph, config, fewer)
    lower = dataclasses.replace(graph, name="lower")
    with pytest.raises(BuildError):
        verify(lower, config, options)
