"""`kvforge quantize`, then `build`, then generation, on the tiny models."""

from pathlib import Path

import pytest

from kvforge.checkpoint import kv_scales, open_checkpoint
from kvforge.compiler import BuildOptions, build_engine
from kvforge.evaluation.run import EvalOptions, run_evaluation
from kvforge.quantize import quantize_checkpoint
from model_defs import load_config

ASSETS = Path(__file__).resolve().parents[3] / "model_defs" / "assets"


@pytest.mark.parametrize("name", ["tiny-swiftkv", "tiny-teacher"])
def test_quantize_build_generate(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With FP8 weights and cache the tiny models still find their needles; the teacher's export is ModelOpt's own, and
    its engine is compiled with --full."""
    if name == "tiny-teacher":
        request.getfixturevalue("compiled_with_full")
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    exported, engine = tmp_path / "exported", tmp_path / "engine"
    quantize_checkpoint(ASSETS / name, exported, "fp8", num_samples=8)
    manifest = build_engine(exported, engine, BuildOptions(max_num_seqs=8, max_num_tokens=512))
    assert (manifest.dtype, manifest.kv_dtype) == ("bfloat16", "fp8_static")
    checkpoint = open_checkpoint(exported)
    assert manifest.kv_scales == kv_scales(checkpoint, load_config(checkpoint.hf_config))
    (score,) = run_evaluation(engine, None, EvalOptions(("needle_single",), num_prompts=12, length=300)).scores
    assert score["num_correct"] >= 11
