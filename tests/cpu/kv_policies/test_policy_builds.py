"""`kvforge build --kv-policy`: what is refused before any work, and what reaches the compiler."""

import json
from pathlib import Path

import pytest

from kvforge.cli import main
from kvforge.common.errors import BuildError
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.kv_policies import Full
from kvforge.kv_policies.shadowkv import ShadowKV
from model_defs import load_config
from tests.support.models.checkpoints import make_checkpoint

SMALL = "shadowkv:rank=8,sparse_budget=64,num_outlier_chunks=2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 dimensions of keys a token."""
    return make_checkpoint(tmp_path_factory.mktemp("policies") / "plain", "llama")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--max-draft-len", "2"], "but with speculation drafts are queries as well; build with --max-draft-len 0."),
        (["--kv-dtype", "fp8"], "but with --kv-dtype fp8 the numbers in it have another; give --kv-dtype float32."),
        (["--kv-dtype", "int8"], "but with --kv-dtype int8 the numbers in it have another; give --kv-dtype float32."),
        (["--kv-dtype", "bf16"], "but with --kv-dtype bfloat16 the numbers in it have another; give --kv-dtype"),
        (["--kv-policy", "h2o", "--kv-dtype", "int4"], "; give --kv-dtype int8 where that goes with the rest, or"),
        (["--kv-policy", "h2o", "--kv-dtype", "k8v4"], "; give --kv-dtype int8 where that goes with the rest, or"),
        (
            ["--target", "tensorrt", "--kv-policy", "expected"],
            "but with target tensorrt plugins alone write in place; build with --target cpu, or with cuda",
        ),
        (
            ["--target", "tensorrt", "--kv-policy", "snapkv", "--kv-dtype", "fp8"],
            "--kv-policy snapkv needs the attention that every key receives, but with --kv-dtype fp8 and target "
            "tensorrt the builder takes no plugin above a cut that reads the cache and writes what it observes; give",
        ),
        (["--page-size", "12"], "--page-size 12 is no multiple of shadowkv's chunk_size 8; give one that is."),
        (["--kv-policy", "shadowkv"], "rank 160 exceeds the 32 dimensions of a token's keys; give at most 32."),
        (["--kv-policy", "shadowkv:rank=33"], "shadowkv: rank 33 exceeds the 32 dimensions"),
        (["--kv-policy", "shadowkv:rank=8,sparse_budget=65"], "sparse_budget 65 is no multiple of chunk_size 8"),
        (["--kv-policy", "shadowkv:budget=8"], "the KV policy shadowkv has no parameter 'budget'; it has rank, chunk_"),
        (["--kv-policy", "h3o"], "the KV policy 'h3o' is unknown; choose from adakv, batchmax, expected, fastgen, "),
    ],
)  # fmt: skip
def test_refused_before_any_work(flags, sentence, checkpoint: Path, tmp_path: Path, capsys) -> None:
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "engine"), "--kv-policy", SMALL, *flags]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("kvforge: error: ") and sentence in error and error.endswith((".", "?")), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--max-draft-len", "2"], "with speculation drafts are queries as well; build with --max-draft-len 0."),
        (["--target", "cuda"], "KV prediction needs --target cpu, but with target cuda "),
        (["--target", "tensorrt"], " there are no kernels or graphs for it; build with --target cpu."),
        (
            ["--kv-dtype", "kivi2"],
            "with KV prediction exact tokens are written over predicted ones; leave --kv-",
        ),
        (["--kv-policy", SMALL], "but with KV prediction an auxiliary model fills it; leave --kv-prediction out."),
    ],
)
def test_kv_prediction_is_refused_before_its_checkpoint_is_read(
    flags, sentence, checkpoint: Path, tmp_path: Path, capsys
) -> None:
    predictor = str(tmp_path / "none")
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "e"), "--kv-prediction", predictor, *flags]) == 1
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sliding_windows_are_refused(tmp_path: Path, capsys) -> None:
    path = make_checkpoint(tmp_path / "windows", "mistral", sliding_window=16)
    assert main(["build", str(path), "-o", str(tmp_path / "engine"), "--kv-policy", SMALL]) == 1
    assert "but with mistral (sliding windows) some layers see only the last tokens;" in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()


def test_a_checkpoint_with_an_8_bit_cache_says_which_dtype_to_give(checkpoint: Path) -> None:
    config = load_config(json.loads((checkpoint / "config.json").read_text()))
    with pytest.raises(
        BuildError, match="with --kv-dtype fp8_static the numbers in it have another; give --kv-dtype b"
    ):
        resolve(BuildOptions(kv_policy=SMALL), config, "BF16", "FP8")
    assert resolve(BuildOptions(kv_policy=SMALL, kv_dtype="bf16"), config, "BF16", "FP8").policy.parameters["rank"] == 8


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_what_is_asked_for_reaches_the_compiler(target: str, checkpoint: Path) -> None:
    config = load_config(json.loads((checkpoint / "config.json").read_text()))
    resolved = resolve(BuildOptions(target=target, kv_policy=SMALL), config, "F32")
    assert resolved.policy == ShadowKV(rank=8, sparse_budget=64, num_outlier_chunks=2)
    assert resolve(BuildOptions(target=target, max_draft_len=3), config, "F32").policy == Full()
