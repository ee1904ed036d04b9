"""Every way a build can be refused: one sentence, exit code 1, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.cli import main
from kvforge.common.errors import BuildError
from kvforge.compiler import build_engine


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(path: Path, edit: Callable[[dict], object]) -> None:
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors")


def rename_shard(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model-00002.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))


GATE = "model.layers.0.mlp.gate_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "is not a checkpoint"),
    "config is no JSON": (lambda p: (p / "config.json").write_text("{"), "cannot be read as JSON"),
    "unsupported architecture": (lambda p: edit_config(p, model_type="mamba"), "model_type 'mamba' is not supported"),
    "unsupported rope": (
        lambda p: edit_config(p, rope_scaling={"rope_type": "dynamic"}, rope_parameters=None),
        "'dynamic' is not supported; supported are default, linear, llama3, yarn, longrope",
    ),
    "heads do not divide": (lambda p: edit_config(p, num_key_value_heads=3), "must be a multiple of"),
    "field of wrong type": (lambda p: edit_config(p, vocab_size="many"), "integer vocab_size"),
    "field missing": (lambda p: edit_config(p, hidden_size=None), "integer hidden_size"),
    "cut beyond the layers": (
        lambda p: edit_config(p, swiftkv=True, num_key_value_layers=9),
        "num_key_value_layers (9)",
    ),
    "layers without weights": (
        lambda p: edit_config(p, num_hidden_layers=2, swiftkv=True, num_key_value_layers=1),
        "has fewer layers than the 2 of its config.json",
    ),
    "a layer that config.json has not": (
        lambda p: edit_weights(p, lambda w: w.update({"model.layers.1.mlp.gate_proj.weight": w[GATE].clone()})),
        "has more layers than the 1 of its config.json",
    ),
    "a bias that config.json has not": (
        lambda p: edit_weights(p, lambda w: w.update({GATE.replace("weight", "bias"): w[GATE][:, 0].clone()})),
        "has model.layers.0.mlp.gate_proj.bias, which config.json does not ask for",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no *.safetensors weights"),
    "missing shard": (rename_shard, "missing"),
    "truncated weights": (lambda p: (p / "model.safetensors").write_bytes(b"\x08"), "not a readable safetensors"),
    "missing tensor": (lambda p: edit_weights(p, lambda w: w.pop(GATE)), f"{GATE} is missing"),
    "wrong shape": (lambda p: edit_weights(p, lambda w: w.update({GATE: w[GATE][:3].clone()})), "has shape [3, 16]"),
    "a NaN": (
        lambda p: edit_weights(p, lambda w: w[GATE][3, 5].fill_(torch.nan)),
        f"Tensor {GATE} in",
    ),
    "an infinity in a norm": (
        lambda p: edit_weights(p, lambda w: w["model.norm.weight"][2].fill_(-torch.inf)),
        "holds -inf as float32; the weights are damaged",
    ),
    "beyond the engine's dtype": (
        lambda p: edit_weights(p, lambda w: w.update({GATE: w[GATE].double() * 1e300})),
        "as float32; the weights are damaged, or too large for that dtype",
    ),
    "quantized": (lambda p: edit_weights(p, lambda w: w.update({GATE: w[GATE].char()})), "has dtype I8"),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "no tokenizer.json"),
}


def assert_refused(arguments: list[str], sentence: str, output: Path, capsys: pytest.CaptureFixture) -> None:
    before = sorted(output.parent.iterdir())
    assert main(arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("kvforge: error: ") and sentence in error and error.endswith("."), error
    assert sorted(output.parent.iterdir()) == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_checkpoint(damage: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    harm, sentence = DAMAGES[damage]
    harm(checkpoint)
    capsys.readouterr()
    assert_refused(["build", str(checkpoint), "-o", str(tmp_path / "engine")], sentence, tmp_path / "engine", capsys)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--target", "tpu"], "Target 'tpu' is not supported"),
        (["--dtype", "int3"], "--dtype 'int3' is not supported"),
        (["--kv-dtype", "int3"], "--kv-dtype 'int3' is not supported; choose auto"),
        (["--kv-dtype", "q8_0"], "--kv-dtype 'q8_0' is not supported, int8 is nearest; choose auto"),
        (["--kv-dtype", "fp8_e4m3", "--kv-policy", "h2o", "--target", "tensorrt"], "--kv-dtype fp8"),
        (["--dtype", "q8_0"], "--dtype 'q8_0' is not supported; choose auto"),
        (["--max-seq-len", "100000"], "is beyond the 512 positions"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--page-size", "-4"], "--page-size is -4"),
        (["--page-size", "9223372036854775807"], "--page-size is 9223372036854775807; it must be at most 4096"),
        (["--max-num-tokens", "4294967296"], "--max-num-tokens is 4294967296; it must be at most 16777216"),
        (["--max-num-seqs", "99999999999999999999"], "it must be at most 1048576"),
        (["--max-draft-len", "-1"], "--max-draft-len is -1; it must be at least 0"),
        (["--max-draft-len", "9", "--max-num-tokens", "9"], "needs a step of 10 tokens"),
        (["--weight-dtype", "int3"], "--weight-dtype 'int3' is not supported"),
        (
            ["--weight-dtype", "int8", "--dtype", "fp32"],
            "--weight-dtype int8 needs --dtype bfloat16, but with",
        ),
        (["--weight-dtype", "int8", "--target", "tensorrt"], "--weight-dtype int8 needs --target cpu, but with"),
        (
            ["--weight-dtype", "int4", "--dtype", "fp32"],
            "--weight-dtype int4 needs --dtype bfloat16, but with",
        ),
        (["--weight-dtype", "int4", "--target", "cuda"], "--weight-dtype int4 needs --target cpu, but with target"),
        (["--weight-dtype", "bf16"], "--weight-dtype bfloat16 is not --dtype float32"),
        (["--kv-dtype", "fp8_static"], "needs a checkpoint that was calibrated for an 8-bit cache"),
        *(
            (
                ["--kv-dtype", "k8v4", "--target", target],
                f"--kv-dtype k8v4 needs K and V in formats of their own, but with target {target} the kernels read "
                "both in one; build with --target cpu.",
            )
            for target in ("cuda", "tensorrt")
        ),
    ],
)
def test_bad_options(
    flags: list[str], sentence: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    capsys.readouterr()
    output = tmp_path / "engine"
    assert_refused(["build", str(checkpoint), "-o", str(output), *flags], sentence, output, capsys)


def test_output_is_never_overwritten_by_accident(checkpoint: Path, tmp_path: Path, capsys) -> None:
    capsys.readouterr()
    command = ["build", str(checkpoint), "-o"]
    assert_refused([*command, str(checkpoint), "--force"], "exists and is not an engine", checkpoint, capsys)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "engine.json").write_text("{}")
    assert_refused([*command, str(tmp_path / "engine")], "add --force", tmp_path / "engine", capsys)


def test_no_compiler(checkpoint: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    capsys.readouterr()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_refused(["build", str(checkpoint), "-o", str(tmp_path / "e")], "install g++", tmp_path / "e", capsys)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("stage", ["weights", "compile lower"])
def test_interrupted_build_leaves_no_engine(stage: str, signal_number: int, checkpoint: Path, tmp_path: Path) -> None:
    """A build stopped in any way leaves nothing at the output; only SIGKILL leaves a hidden staging directory,
    which the next build removes."""
    output = tmp_path / "out" / "engine"
    script = (
        "import signal, sys, time\nfrom kvforge.compiler import build_engine\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in background
        f"build_engine({str(checkpoint)!r}, {str(output)!r}, progress=lambda stage: "
        f"(print(stage, flush=True), stage == {stage!r} and time.sleep(600)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != stage:
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal_number)
    assert process.wait(timeout=300) != 0
    assert not output.exists()
    left = os.listdir(output.parent)
    assert len(left) == (1 if signal_number == signal.SIGKILL else 0)

    def stop(stage: str) -> None:
        if stage == "weights":
            raise BuildError("enough.")

    with pytest.raises(BuildError, match="enough"):
        build_engine(checkpoint, output, progress=stop)
    assert os.listdir(output.parent) == []
