"""A server whose prompts' cache is predicted gives the answers of the plain-torch definition."""

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest
import torch

from kvforge.cli import main
from kvforge.common.exact_intervals import ExactTokens
from kvforge.compiler import BuildOptions, build_engine
from kvforge.manifest import load_manifest
from kvforge.prediction.load import load_pair
from kvforge.prediction.predicted_generation import generate
from kvforge.serving.client import StreamingClient
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.prediction import random_predictor
from tests.support.serving.server import ENDLESS, ask, started, streamed, used_pages, wait_until

LENGTHS = (90, 3, 41, 128, 64, 17)
PROMPTS = [[3 + (7 * seed + place * place) % 300 for place in range(length)] for seed, length in enumerate(LENGTHS)]
NUM_TOKENS = 24
EXACT = ExactTokens(first=4, last=5, share=0.2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The base and its predictor."""
    folder = tmp_path_factory.mktemp("predicted")
    base = make_checkpoint(folder / "base", num_hidden_layers=2, max_position_embeddings=65536)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8, "num_key_value_heads": 1}
    return base, random_predictor(folder / "p", base, layers=(0, 1), max_position_embeddings=65536, **sizes)


@pytest.fixture(scope="module")
def engine(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = tmp_path_factory.mktemp("engine") / "engine"
    base, predictor = checkpoints
    sizes = {"page_size": 8, "max_num_tokens": 32, "max_num_seqs": 8, "dtype": "float32"}
    options = BuildOptions(**sizes, kv_prediction=str(predictor))
    build_engine(base, engine, options)
    return engine


@pytest.fixture(scope="module")
def predicting_server(engine: Path) -> Iterator[TritonServer]:
    with started(TritonServer(engine, ServerOptions(kv_cache_gib=0.1, exact_tokens=EXACT))) as running:
        yield running


def test_requests_at_once_are_answered_as_the_definition_says(
    checkpoints: tuple[Path, Path], predicting_server: TritonServer
) -> None:
    modules = load_pair(*checkpoints, torch.float32)
    expected = [generate(*modules, prompt, NUM_TOKENS, EXACT) for prompt in PROMPTS]
    assert expected != [generate(*modules, prompt, NUM_TOKENS, ExactTokens()) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool, StreamingClient(predicting_server.grpc_url) as client:
        cancelled = client.generate("tensorrt_llm", ask("tensorrt_llm", PROMPTS[0] * 3, ENDLESS))
        next(cancelled)
        answers = pool.map(streamed, repeat(predicting_server), PROMPTS, repeat(NUM_TOKENS))
        next(cancelled)
        cancelled.close()
        assert list(answers) == expected
    wait_until(lambda: used_pages(predicting_server) == 0, "pages given back")


def test_inspect_shows_the_auxiliary_model(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = load_manifest(engine)
    of_token = 2 * 8 * 4  # K and V of one KV head of 8 in float32, of the one layer that is run
    assert main(["inspect", str(engine)]) == 0
    assert f"prediction  1 layer of an auxiliary model for the cache of prompts, {of_token} more" in (
        capsys.readouterr().out
    )
    assert main(["inspect", str(engine), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    num_pages = manifest.max_seq_len // manifest.page_size
    assert shown["sequence_device_bytes"] == shown["sequence_full_bytes"] == num_pages * manifest.page_bytes
    assert shown["prefill_flops_per_token_at_1024"] < dataclasses.replace(
        manifest, auxiliary_model=None
    ).prefill_flops_per_token(1024)
