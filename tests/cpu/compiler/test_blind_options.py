"""Blind cuts: what they are rewired, planned and built with, and what is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.cli import main
from kvforge.common.errors import BuildError, EngineError, KvforgeError, RequestError
from kvforge.compiler import BuildOptions
from kvforge.compiler.export import export_lower, export_upper
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import resolve
from kvforge.costs.cache import kv_bytes, kv_read_bytes, sequence_kv_bytes
from kvforge.costs.flops import full_token, output_flops, prompt_flops, skipped_token
from kvforge.kv_policies.visibility import Visibility
from kvforge.quantize.export import _open as open_to_quantize
from kvforge.rewire.source import open_source
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from kvforge.runtime.config import resolve_config
from kvforge.runtime.prefixes.options import PrefixOptions
from kvforge.runtime.scoring.score import score
from model_defs import ModelConfig, ModelError, load_config
from model_defs.hf_config import BLIND
from tests.support.models.checkpoints import SMALL, load_weights, make_blind, make_checkpoint
from tests.support.sessions.eager import eager_session

HF = {**SMALL, "model_type": "llama_swiftkv", "num_key_value_layers": 2, "cut_kind": BLIND, "num_anchor_tokens": 16}
CONFIG = load_config(HF)
OPTIONS = BuildOptions(page_size=8, max_num_tokens=64)


def asked(**options: Any) -> Any:
    return resolve(dataclasses.replace(OPTIONS, **options), CONFIG, "F32")


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 15, 16, 17, 18, 40])
def test_visibility_counts_what_it_shows(num_prompt_tokens: int) -> None:
    visibility = Visibility(16)
    shown = [p < 16 or p >= num_prompt_tokens - 1 for p in range(60)]
    for end in range(61):
        assert visibility.num_seen(num_prompt_tokens, end) == sum(shown[:end])
        for start in range(end):
            seen = [p for part in visibility.seen(num_prompt_tokens, start, end) for p in part]
            assert seen == [p for p in range(start, end) if shown[p]]


def test_the_graphs_write_what_they_own() -> None:
    options = asked()
    lower, upper = export_lower(CONFIG, options), export_upper(CONFIG, options)
    assert (lower.written, upper.written) == ((0, 1), (2, 3))
    for graph in (lower, upper):
        verify(graph, CONFIG, options)
    for graph in (dataclasses.replace(lower, written=()), dataclasses.replace(upper, written=(2,))):
        with pytest.raises(BuildError):
            verify(graph, CONFIG, options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_policy": "snapkv"}, "blind cut layers above it see no prompt but for its anchors"),
        ({"kv_policy": "shadowkv"}, "blind cut"),
        ({"kv_policy": "quest"}, "blind cut"),
        ({"kv_dtype": "kivi2", "page_size": 16}, "blind cut"),
        ({"target": "cuda"}, "blind cut needs --target cpu"),
        ({"target": "tensorrt"}, "blind cut needs --target cpu"),
        ({"kv_prediction": "x"}, "blind cut"),
        ({"page_size": 32}, "16 anchors above its cut, which fill no whole pages of 32 tokens"),
        ({"page_size": 3}, "give a --page-size that divides them."),
    ],
)
def test_builds_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BuildError) as error:
        asked(**options)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cut_kind": "deaf"}, "cut_kind 'deaf' is not supported; supported are single-input, blind."),
        ({"num_anchor_tokens": None}, "num_anchor_tokens"),
        ({"num_anchor_tokens": -1}, "num_anchor_tokens"),
        ({"early_exit": True}, "it has an early exit"),
        ({"num_key_value_layers": 4}, "it has no cut"),
        ({"model_type": "mistral_swiftkv", "sliding_window": 8}, "layers above the cut have a sliding window"),
        ({"model_type": "deepseek_v2_swiftkv"}, "its attention is latent"),
    ],
)
def test_models_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        load_config({**HF, **changes})
    assert sentence in str(error.value)


def test_what_does_not_read_such_a_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_blind(make_checkpoint(tmp_path / "model"), 2, 16)
    for read in (open_source, open_to_quantize):
        with pytest.raises(KvforgeError, match="has a blind cut, which kvforge does not rewire, predict or quantize"):
            read(path)
    assert main(["rewire", str(path), str(tmp_path / "out"), "--cut-layer", "2"]) == 1
    assert "has a blind cut" in capsys.readouterr().err
    assert main(["build", str(path), "-o", str(tmp_path / "engine"), "--target", "vllm"]) == 1
    assert "Target vllm does not run blind cuts" in capsys.readouterr().err


def test_engines_refuse_what_needs_prompts_above_the_cut(tmp_path: Path) -> None:
    session = eager_session(make_blind(make_checkpoint(tmp_path / "model"), 2, 16), OPTIONS)
    engine = LLMEngine(session=session, num_pages=8, num_upper_pages=3)
    with pytest.raises(RequestError, match="upper layers see no prompt"):
        engine.add_request("a", [3, 4], SamplingParams(max_tokens=2, prompt_logprobs=1))
    with pytest.raises(RequestError, match="39 tokens past the model's cut and need 5 pages there"):
        engine.add_request("a", [3] * 10, SamplingParams(max_tokens=30))
    engine.add_request("a", [3] * 30, SamplingParams(max_tokens=5))
    with pytest.raises(RequestError, match="needs 6 pages above the model's cut, but the engine has 3"):
        score(LLM(session=session, num_pages=8, num_upper_pages=3), [([3, 4], [5] * 40)])
    with pytest.raises(EngineError, match="prefix_dir keeps pages of all owners, and above a blind cut"):
        PrefixOptions(tmp_path).check(session.manifest)
    with pytest.raises(EngineError, match="num_upper_pages is 0"):
        LLMEngine(session=session, num_pages=8, num_upper_pages=0)


@pytest.mark.parametrize("gib", [0.002, 0.01, 0.1, 0.5])
def test_a_budget_is_divided_among_both_pools(gib: float, tmp_path: Path) -> None:
    manifest = eager_session(make_blind(make_checkpoint(tmp_path / "model"), 2, 16), OPTIONS).manifest
    config = resolve_config(manifest, 0, kv_cache_gib=gib)
    used = config.num_pages * manifest.page_bytes + config.num_upper_pages * manifest.upper_page_bytes
    assert used <= gib * 2**30
    assert config.num_upper_pages >= max(config.max_pages_per_seq, config.num_pages / 4)
    is_full = config.num_pages == 64 * config.max_pages_per_seq
    assert is_full or used > gib * 2**30 - 2 * (manifest.page_bytes + manifest.upper_page_bytes)
    with pytest.raises(EngineError, match="one sequence of 512 tokens needs"):
        resolve_config(manifest, 0, kv_cache_gib=0.0004)


def test_costs_by_hand() -> None:
    """4 layers of 64, 2 KV heads of 16, cut at 2, 16 anchors; a prompt of 100 and 10 generated tokens."""
    plain = dataclasses.replace(CONFIG, num_anchors=0)
    of_owner = 2 * 2 * 16 * 2
    assert kv_bytes(CONFIG, "bfloat16") == 4 * of_owner
    assert sequence_kv_bytes(CONFIG, "bfloat16", 100, 110) == of_owner * (2 * 110 + 2 * (16 + 1 + 10))
    assert sequence_kv_bytes(CONFIG, "bfloat16", 10, 20) == of_owner * 4 * 20
    assert kv_read_bytes(CONFIG, "bfloat16", 105, 100) == of_owner * (2 * 105 + 2 * (16 + 1 + 5))
    assert sequence_kv_bytes(plain, "bfloat16", 100, 110) == of_owner * 4 * 110
    one = full_token(CONFIG, 105, num_prompt_tokens=100)
    assert one.attention == 4 * 64 * (2 * 105 + 2 * 22) and one.key_value == 2 * 64 * 4 * 64
    below = skipped_token(CONFIG, 100)
    assert below.key_value == 2 * 64 * 2 * 64 and below.total < skipped_token(plain, 100).total
    steps = [full_token(CONFIG, 100 + i, num_prompt_tokens=100).total for i in range(1, 10)]
    assert output_flops(CONFIG, 100, 10) == pytest.approx(sum(steps))
    of_anchor = [full_token(CONFIG, i).total - 2 * 320 * 64 for i in range(1, 17)]
    of_hidden = skipped_token(CONFIG, 100).total * 100
    both = sum(skipped_token_at(CONFIG, i) for i in range(1, 17)) + skipped_token_at(CONFIG, 100)
    expected = of_hidden + sum(of_anchor) + full_token(CONFIG, 100).total - both
    assert prompt_flops(CONFIG, 100) == pytest.approx(expected)


def skipped_token_at(model: ModelConfig, context: int) -> float:
    """What a token with so many keys costs below the cut."""
    return skipped_token(model, 2 * context - 1).total


def test_rewire_and_plan_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make_checkpoint(tmp_path / "model", num_hidden_layers=5), tmp_path / "out"
    command = ["rewire", str(source), str(out), "--cut-layer", "2", "--cut-kind", "blind", "--group-size", "2"]
    assert main([*command, "--num-anchors", "24", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["num_anchors"], written["new_parameters"], written["init"]) == (24, 0, "")
    config = read_model_config(open_model(out))
    assert (config.cut, config.group_size, config.num_anchors, config.owners) == (2, 2, 24, (0, 1, 2, 4))
    before, after = load_weights(source), load_weights(out)
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)
    for more, sentence in (
        (["--init", "ridge"], "--init ridge is for cuts with a single input"),
        (["--early-exit"], "--early-exit is for cuts with a single input"),
        (["--drop-teacher"], "--drop-teacher is for cuts with a single input"),
        (["--num-anchors", "0"], "--num-anchors is 0; give at least 1."),
        (["--cut-kind", "single-input", "--num-anchors", "8"], "--num-anchors is for --cut-kind blind"),
        (["--cut-layer", "auto"], "--cut-layer auto is for cuts with a single input"),
    ):
        assert main([*command, *more, "--force"]) == 1
        assert sentence in capsys.readouterr().err
    plan = ["plan", "--model", str(source), "--cut", "2", "--group-size", "1", "--input", "400", "--output", "40"]
    assert main([*plan, "--cut-kind", "single-input", "blind", "--memory-gib", "0.01", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["variants"]}
    single, blind = rows["cut 2 of 5"], rows["cut 2 of 5, blind"]
    of_owner = 2 * 2 * 16 * 4
    assert single["kv_bytes_per_request"] == 5 * of_owner * 440
    assert blind["kv_bytes_per_request"] == of_owner * (2 * 440 + 3 * (32 + 1 + 40))
    assert blind["step_kv_bytes_read"] == of_owner * (2 * 420 + 3 * (32 + 1 + 20))
    assert main([*plan, "--cut-kind", "blind"]) == 0
    assert "a decode step in its middle reads" in capsys.readouterr().out
    for more, sentence in (
        (["--kv-policy", "snapkv"], "blind cut"),
        (["--tensor-parallel-size", "2"], "A blind cut is not divided among ranks"),
        (["--prefix-gib", "1"], "--prefix-dir does not keep prompts of models with a blind cut"),
    ):
        assert main([*plan, "--cut-kind", "blind", *more]) == 1
        assert sentence in capsys.readouterr().err
