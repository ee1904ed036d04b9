"""The engine in a process of another interpreter, as ``LLM``, ``AsyncLLM`` and the commands have it: here the
interpreter is this one, with a vLLM that counts."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvforge.cli import main
from kvforge.common.errors import EngineError, RequestError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.runtime import LLM, AsyncLLM, SamplingParams
from kvforge.runtime.scoring.score import score
from kvforge.serving.engine.remote import RemoteEngine
from tests.support.vllm.interpreters import counting_interpreter

SWIFTKV = Path(__file__).resolve().parents[3] / "model_defs" / "assets" / "tiny-swiftkv"


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    options = BuildOptions(
        target="vllm", engine_python=counting_interpreter(folder), max_seq_len=1024, max_num_tokens=64
    )
    build_engine(SWIFTKV, folder / "engine", options)
    return folder / "engine"


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    llm = LLM(engine_dir, kv_cache_gib=0.25)
    yield llm
    remote(llm).close()


def remote(llm: LLM) -> RemoteEngine:
    engine: Any = llm.engine
    assert isinstance(engine, RemoteEngine)
    return engine


def test_texts_and_tokens(llm: LLM) -> None:
    first, second = llm.generate([[10, 20], [30]], SamplingParams(max_tokens=3, n=2, logprobs=2), use_tqdm=False)
    assert [output.token_ids for output in (*first.outputs, *second.outputs)] == [[21, 22, 23]] * 2 + [[31, 32, 33]] * 2
    assert llm.tokenizer is not None and first.outputs[0].text == llm.tokenizer.decode([21, 22, 23])
    entries = first.outputs[1].logprobs
    assert entries is not None and (entries[0].rank, list(entries[0].top)) == (1, [21, 23])
    assert first.metrics is not None and first.metrics.first_token_time_ns > first.metrics.arrival_time_ns


def test_a_stream_and_a_request_that_is_given_up(llm: LLM) -> None:
    stream = llm.generate_stream([10], SamplingParams(max_tokens=500, ignore_eos=True))
    assert next(stream).outputs[0].token_ids[0] == 11
    stream.close()
    (output,) = llm.generate([[10]], SamplingParams(max_tokens=2, stop_token_ids=[12]), use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 12)
    assert llm.engine.stats()["num_pages"] == llm.engine.config.num_pages == 64


def test_parameters_reach_the_process(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, logit_bias={44: 9000.0}, stop_words_ids=[[44, 44]], seed=3)
    (output,) = llm.generate([[10]], params, use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ([44, 44], (44, 44))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"draft_token_ids": [1]}, "draft_token_ids is not offered by an engine of target vllm"),
        ({"guided_decoding": {"kind": "regex", "guide": "("}}, "regex"),
        ({"stop_token_ids": [5000]}, "stop_token_ids holds token id 5000"),
    ],
)
def test_refusals_come_before_anything_starts(llm: LLM, params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate([[10]], SamplingParams(**params), use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_given_tokens_are_not_scored(llm: LLM) -> None:
    with pytest.raises(EngineError, match="scored by kvforge's own engines alone"):
        score(llm, [([1, 2], [3])])


def test_the_commands(engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(engine_dir), "--prompt", "a", "--max-tokens", "4", "--json", "--quiet"]) == 0
    assert len(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]) == 4
    bench = ["bench", str(engine_dir), "--input-len", "100", "--output-len", "4", "--concurrency", "2", "--json"]
    assert main([*bench, "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["combined_tok_s"] > 0


def test_async_llm(engine_dir: Path) -> None:
    async def ask() -> list[int]:
        async with AsyncLLM(engine_dir) as llm:
            outputs = [output async for output in llm.generate([10], SamplingParams(max_tokens=3))]
            return outputs[-1].outputs[0].token_ids

    assert asyncio.run(ask()) == [11, 12, 13]


def test_an_engine_that_ends_is_an_error(engine_dir: Path) -> None:
    engine = RemoteEngine(engine_dir)
    engine.add_request("a", [10], SamplingParams(max_tokens=900))
    os.kill(engine._process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="the engine process ended"):
        while True:
            engine.step()
    assert engine._process.poll() == -signal.SIGKILL


def test_what_the_process_refuses_to_load_is_said(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="max_seq_len is 4096, but the engine was built for 1 to 1024"):
        RemoteEngine(engine_dir, max_seq_len=4096)
    with pytest.raises(EngineError, match="early_exit_threshold is for kvforge's own engines"):
        RemoteEngine(engine_dir, early_exit_threshold=0.5)
    with pytest.raises(EngineError, match="early_exit_prompts is for kvforge's own engines"):
        RemoteEngine(engine_dir, early_exit_prompts=True)
    monkeypatch.setenv("KVFORGE_VLLM_PYTHON", "no-such-python")
    with pytest.raises(EngineError, match="set KVFORGE_VLLM_PYTHON"):
        RemoteEngine(engine_dir)
