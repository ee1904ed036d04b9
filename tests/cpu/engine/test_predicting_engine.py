"""A compiled engine whose prompts' cache is predicted, through the command line, against the reference."""

import json
from pathlib import Path

import pytest
import torch

from kvforge.cli import main
from kvforge.common.exact_intervals import ExactTokens
from kvforge.manifest import load_manifest
from kvforge.prediction.load import load_pair
from kvforge.prediction.predicted_generation import generate
from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.prediction import random_predictor

AUXILIARY = {"layers": (0, 1), "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8, "num_key_value_heads": 1}


def test_a_compiled_engine_gives_the_reference_s_tokens(tmp_path: Path, full: bool, capsys) -> None:
    if not full:
        pytest.skip("an engine to compile; run with --full")
    base = make_checkpoint(tmp_path / "base", num_hidden_layers=2)
    predictor = random_predictor(tmp_path / "p", base, **AUXILIARY)
    sizes = "--page-size 8 --max-num-tokens 64 --max-num-seqs 8 --max-seq-len 128 --dtype float32 --json".split()
    engine = tmp_path / "engine"
    assert main(["build", str(base), "-o", str(engine), "--kv-prediction", str(predictor), *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["auxiliary_model"]["num_layers"] == 1
    assert load_manifest(engine).graphs == ("lower", "upper", "predict")
    modules, prompt = load_pair(base, predictor, torch.float32), [3 + 7 * index % 300 for index in range(90)]
    for exact in (ExactTokens(), ExactTokens(5, 3), ExactTokens(2, 1, 0.3, 4), ExactTokens(100)):
        loaded = LLMEngine(engine, num_pages=32, max_num_tokens=17, exact_tokens=exact)
        loaded.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        tokens = []
        while loaded.has_unfinished():
            tokens += [token for output in loaded.step() for token in output.new_token_ids]
        assert tokens == generate(*modules, prompt, 8, exact)
