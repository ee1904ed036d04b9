"""The published SwiftKV checkpoints, by their layout: those in bf16 become engines, those in FP8 are read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvforge import LLM, SamplingParams
from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.options import resolve
from kvforge.manifest import load_manifest
from kvforge.runtime.sessions.session import load_session
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights
from tests.support.models.published import COMPRESSED, NUM_SHARDS, make_published
from tests.support.rounding import assert_near, model_error
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.uncompiled import leave_uncompiled

NUM_PROMPT, NUM_OUTPUT = 90, 20


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_published(tmp_path_factory.mktemp("published") / "Llama-3.1-SwiftKV-8B-Instruct")


@pytest.fixture(scope="module")
def engine(published: Path, full: bool) -> Iterator[Path]:
    """In fp32, as the reference computes; what is stored is bf16. Compiled with --full."""
    path = published.parent / "engine"
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not full:
            leave_uncompiled(monkeypatch)
        build_engine(published, path, BuildOptions(dtype="float32", page_size=8, max_num_tokens=256))
        yield path


def prompt() -> list[int]:
    return torch.randint(3, 300, (NUM_PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()


def opened(path: Path) -> Checkpoint:
    checkpoint = open_model(path)
    check_weights(checkpoint, read_model_config(checkpoint))
    return checkpoint


def test_the_configuration_is_read_as_it_is_published(published: Path) -> None:
    checkpoint = opened(published)
    config = read_model_config(checkpoint)
    assert len(set(checkpoint.file_of_tensor.values())) == NUM_SHARDS
    assert (config.cut, config.num_layers, config.group_size) == (2, 4, 1)
    assert config.eos_token_ids == (301, 308, 309)
    assert config.rope.kind == "llama3" and config.rope.theta == 500000.0
    stored = checkpoint.dtype("model.embed_tokens.weight")
    assert stored == "BF16" and checkpoint.hf_config["torch_dtype"] == "float32"
    assert resolve(BuildOptions(), config, stored).dtype == "bfloat16"  # what is stored, not what config.json names


def test_its_engine_computes_what_the_reference_does(published: Path, engine: Path) -> None:
    config = read_model_config(open_model(published))
    weights = {name: tensor.float() for name, tensor in load_weights(published).items()}
    driver = StepDriver(load_session(engine, load_manifest(engine)))
    logits = torch.cat([driver.run(prompt()[:50]), driver.run(prompt()[50:])])
    expected = reference_logits(config, weights, torch.tensor(prompt()))
    assert_near(logits, expected, model_error(config, NUM_PROMPT))


def test_its_engine_generates_the_most_probable_tokens(published: Path, engine: Path) -> None:
    config = read_model_config(open_model(published))
    weights = {name: tensor.float() for name, tensor in load_weights(published).items()}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    llm = LLM(engine, kv_cache_gib=0.01)
    tokens = llm.generate([prompt()], params, use_tqdm=False)[0].outputs[0].token_ids
    assert len(tokens) == NUM_OUTPUT
    expected = reference_logits(config, weights, torch.tensor([*prompt(), *tokens]))[NUM_PROMPT - 1 : -1]
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    error = model_error(config, NUM_PROMPT + NUM_OUTPUT) * expected.abs().max()
    assert ((expected.max(-1).values - chosen) <= 2 * error).all()
    for end in config.eos_token_ids:
        ended = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={end: 100.0})
        (output,) = llm.generate([prompt()], ended, use_tqdm=False)[0].outputs
        assert output.finish_reason == "stop" and output.token_ids == [end]


def test_the_compressed_ones_are_read_as_their_weights_times_their_scales(published: Path, tmp_path: Path) -> None:
    config = json.loads((published / "config.json").read_text()) | {"quantization_config": COMPRESSED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen, stored = {}, {}
    for name, tensor in load_weights(published).items():
        stored[name] = seen[name] = tensor
        if "proj" in name:
            scale = (tensor.float().abs().amax(1, keepdim=True) / 448).bfloat16()
            stored[name] = (tensor.float() / scale.float()).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale
            seen[name] = stored[name].float() * scale.float()
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = opened(tmp_path)
    assert resolve(BuildOptions(), read_model_config(checkpoint), checkpoint.dtype("model.embed_tokens.weight"))
    for name, tensor in seen.items():
        assert torch.equal(checkpoint.read(name, tuple(tensor.shape)), tensor)
