"""`kvforge serve OWNER/NAME`: downloaded, built once with the options of a build, served under that name."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from kvforge import LLM, SamplingParams
from kvforge.common.errors import KvforgeError
from kvforge.engine_cache import build as cache_build
from kvforge.engine_cache.store import list_entries, remove_all
from tests.support.hub_server import Repository, hub_server
from tests.support.models.checkpoints import make_checkpoint
from tests.support.serving.serve_process import ServeProcess, refused_start

NAME = "someone/tiny"
PROMPT = "The secret number of the copper harbor is 4213. The secret number of the copper harbor is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "engines"


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return make_checkpoint(folder.parent / "checkpoint", dtype=torch.bfloat16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def served(folder: Path, checkpoint: Path) -> Iterator[ServeProcess]:
    with hub_server() as hub:
        hub.repositories[NAME] = Repository(checkpoint)
        environment = hub.environment(folder.parent / "hub", KVFORGE_ENGINE_CACHE=str(folder))
        options = ("--openai", "--openai-port", "0", "--kv-dtype", "fp8", "--max-seq-len", "512")
        with ServeProcess(Path(NAME), *options, env=environment) as running:
            yield running


def test_it_answers_under_its_name_as_its_engine_does_offline(
    served: ServeProcess, folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = openai.OpenAI(base_url=served.openai_url, api_key="none", max_retries=0, timeout=180)
    assert [model.id for model in client.models.list()] == [NAME]
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0)
    monkeypatch.setenv("KVFORGE_ENGINE_CACHE", str(folder))
    monkeypatch.setattr(cache_build, "build_engine", lambda *given, **more: pytest.fail("built again"))
    llm = LLM(checkpoint, build_options={"kv_dtype": "fp8", "max_seq_len": 512}, kv_cache_gib=0.1)  # the same content
    params = SamplingParams(temperature=0.0, max_tokens=12)
    assert answer.choices[0].text == llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    assert llm.engine.manifest.kv_dtype == "fp8" and llm.engine.manifest.max_seq_len == 512


def test_its_engine_is_not_removed_while_it_serves(served: ServeProcess, folder: Path) -> None:
    (entry,) = list_entries(folder)
    assert entry.source == NAME and entry.options == {"kv_dtype": "fp8", "max_seq_len": 512}
    with pytest.raises(KvforgeError, match="while a process uses it"):
        remove_all(folder)
    assert served.health()[0] == 200


def test_a_name_that_is_none_is_a_sentence(folder: Path) -> None:
    with hub_server() as hub:
        code, errors = refused_start(Path("someone/nothing"), env=hub.environment(folder.parent / "hub"))
    assert code == 1 and errors.startswith("kvforge: error: someone/nothing is neither a path here nor a repository")
