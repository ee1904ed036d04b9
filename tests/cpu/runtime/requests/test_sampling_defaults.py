"""Sampling of requests that do not say: the model's generation_config.json, then what was chosen for all requests."""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

import pytest

from kvforge.cli import make_parser
from kvforge.commands.sampling_options import sampling_defaults, sampling_options
from kvforge.common.errors import KvforgeError, RequestError
from kvforge.common.sampling_fields import DEFAULT_FIELDS
from kvforge.manifest import TOKENIZER_DIR
from kvforge.runtime import LLM, AsyncLLM, LLMEngine, SamplingParams
from kvforge.runtime.requests.defaults import FILE, NEUTRAL, SamplingDefaults
from tests.support.sessions.fake import FakeSession

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "bos_token_id": 1}
OTHERS = {"temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5}


def write(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(config))
    return folder


def parsed(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args([arguments[0], "ENGINE", *arguments[1:]])


def options(*arguments: str) -> list[str]:
    return list(itertools.chain(*((f"--{name.replace('_', '-')}", f"{OTHERS[name]}") for name in arguments)))


def test_the_models_own(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN3)
    model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    defaults = SamplingDefaults.read(folder)
    assert defaults.values == {**NEUTRAL, **model} and defaults.params == SamplingParams(**model)
    assert str(defaults) == (
        "temperature 0.6, top_p 0.95, top_k 20 (generation_config.json), min_p 0, repetition_penalty 1 (neutral)"
    )
    assert SamplingDefaults.read(folder, "none").values == NEUTRAL
    assert SamplingDefaults.read(tmp_path / "nowhere").values == SamplingDefaults.read(None).values == NEUTRAL
    assert {name: getattr(SamplingParams(), name) for name in DEFAULT_FIELDS} == NEUTRAL


@pytest.mark.parametrize("name", DEFAULT_FIELDS)
@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_each_field_by_model_and_command_line(tmp_path: Path, command: str, name: str) -> None:
    folder = write(tmp_path, {name: OTHERS[name]})
    plain, chosen = parsed(command), parsed(command, *options(name))
    assert sampling_defaults(plain, folder).values[name] == OTHERS[name]
    assert sampling_defaults(chosen, tmp_path / "nowhere").values[name] == OTHERS[name]
    assert sampling_defaults(chosen, write(tmp_path / "other", {name: 1})).values[name] == OTHERS[name]
    assert sampling_defaults(parsed(command, "--generation-config", "none"), folder).values == NEUTRAL
    if command != "serve":
        assert sampling_options(plain, folder)[name] == sampling_options(chosen, tmp_path)[name] == OTHERS[name]


def test_commands_are_greedy_until_somebody_asks(tmp_path: Path, capsys) -> None:
    """Any of the ways to choose among tokens is asking, and so has an effect."""
    assert sampling_options(parsed("generate"), tmp_path)["temperature"] == 0
    assert sampling_options(parsed("generate", *options("repetition_penalty")), tmp_path)["temperature"] == 0
    assert sampling_options(parsed("generate", *options("top_p")), tmp_path)["temperature"] == 1
    assert capsys.readouterr().err == ""
    assert sampling_options(parsed("chat"), write(tmp_path, {"top_k": 20}))["temperature"] == 1
    assert "top_k 20 (generation_config.json)" in capsys.readouterr().err
    assert sampling_options(parsed("chat", "--temperature", "0"), tmp_path)["temperature"] == 0
    assert sampling_options(parsed("chat", "--generation-config", "none"), tmp_path)["temperature"] == 0


@pytest.mark.parametrize("config", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": True}, [], "x", {"min_p": -1}])
def test_what_cannot_be_used_is_refused(tmp_path: Path, config: object) -> None:
    folder = write(tmp_path, config)
    with pytest.raises(KvforgeError, match=r"generation_config.json cannot be used \(.*--generation-config none"):
        SamplingDefaults.read(folder)
    assert SamplingDefaults.read(folder, "none").values == NEUTRAL
    with pytest.raises(RequestError, match="top_p is 2"):
        SamplingDefaults.read(None, chosen={"top_p": 2})
    with pytest.raises(RequestError, match="give one of auto, none"):
        SamplingDefaults.read(None, "vllm")


def test_in_python_prompts_without_parameters_have_them(tmp_path: Path, monkeypatch) -> None:
    def make_engine(directory: Path) -> LLMEngine:
        return LLMEngine(session=FakeSession(), num_pages=40)

    monkeypatch.setattr("kvforge.runtime.llm.load_engine", make_engine)
    monkeypatch.setattr("kvforge.runtime.async_llm.load_engine", make_engine)
    config = {"temperature": 0.0, "repetition_penalty": 50.0}
    write(tmp_path / TOKENIZER_DIR, config)
    llm = LLM(tmp_path)
    assert llm.get_default_sampling_params() == SamplingParams(**config)
    assert LLM(tmp_path, generation_config="none").get_default_sampling_params() == SamplingParams()
    (asked,) = llm.generate([[5, 6]], SamplingParams(**config), use_tqdm=False)
    (plain,) = llm.generate([[5, 6]], SamplingParams(temperature=0.0), use_tqdm=False)
    (silent,) = llm.generate([[5, 6]], use_tqdm=False)
    tokens = asked.outputs[0].token_ids
    assert silent.outputs[0].token_ids == tokens != plain.outputs[0].token_ids

    async def run() -> list[int]:
        async with AsyncLLM(tmp_path) as other:
            return [output async for output in other.generate([5, 6])][-1].outputs[0].token_ids

    assert asyncio.run(run()) == tokens
