"""``kvforge quantize --recipe int4``: rounding by a layer's inputs, and the checkpoint that is written."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F

from kvforge.checkpoint.model import check_weights, int4_dtype, open_model, read_model_config
from kvforge.cli import main
from kvforge.common import display
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.cpu_graph import linears
from kvforge.quantize import quantize_checkpoint
from kvforge.swiftkv import load_model
from kvforge.tokenization.calibration import calibration_samples
from model_defs.weights import weight_specs
from plugins.packed_linear.by_inputs import round_by_inputs
from plugins.packed_linear.int4 import round_to_codes
from plugins.packed_linear.int4_steps import half_scales_of_steps, in_steps, round_in_steps
from plugins.packed_linear.packing import IN_STEPS, unpack, unpack_codes
from tests.support.models.checkpoints import make_checkpoint

STEP_ROUNDING = 2**-22
"""Of a scale that is divided by its steps and multiplied by them again in float32: two roundings, and two to spare."""
STUDENT = Path(__file__).resolve().parents[3] / "model_defs" / "assets" / "tiny-swiftkv"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_inputs_that_have_nothing_in_common_leave_the_nearest_codes() -> None:
    weight = normal(20, 70)
    rounded, nearest = round_by_inputs(weight, torch.eye(70)), round_in_steps(weight, half_scales_of_steps(weight))
    assert torch.equal(rounded.as_codes().scales, nearest.as_codes().scales)
    assert torch.equal(rounded.codes, nearest.codes)


def test_scales_are_whole_steps_of_any_size() -> None:
    """Outputs whose largest scale has fewer than 15 steps once the inputs before it were rounded, and outputs that
    float16 has few bits for."""
    inputs = normal(500, 128) @ (normal(128, 128, seed=1) / 4 + torch.eye(128))
    for size in (1.0, 1e-3, 1e-5, 1e-7, 1e-9):
        weight = normal(64, 128, seed=2) * size
        rounded = round_by_inputs(weight, inputs.T @ inputs).as_codes()
        stepped = in_steps(rounded)
        assert stepped is not None and torch.equal(stepped.codes, rounded.codes), size
        torch.testing.assert_close(stepped.dequantize(), rounded.dequantize(), rtol=STEP_ROUNDING, atol=0)
        assert torch.equal(rounded.scales, rounded.scales.half().float())


def test_outputs_are_nearer_than_by_the_nearest_codes() -> None:
    """Inputs go together, and one is always zero."""
    weight = normal(48, 96)
    inputs = normal(600, 12, seed=1) @ normal(12, 96, seed=2) + 0.3 * normal(600, 96, seed=3)
    inputs[:, 5] = 0

    def error(rounded: torch.Tensor) -> torch.Tensor:
        return (inputs @ (rounded - weight).T).square().sum()

    by_inputs = round_by_inputs(weight, inputs.T @ inputs)
    assert error(by_inputs.dequantize()) < 0.5 * error(round_to_codes(weight).dequantize())


@torch.inference_mode()
def test_the_student_stays_nearer_to_itself_than_by_the_nearest_codes(tmp_path: Path) -> None:
    """KL to the exact model on texts that were not calibrated with; cut and groups, and only what a model reads."""
    quantize_checkpoint(STUDENT, tmp_path / "int4", "int4", num_samples=12, num_tokens=192)
    written = open_model(tmp_path / "int4")
    config = read_model_config(written)
    check_weights(written, config)
    exact = load_model(open_model(STUDENT), config, torch.float32)
    names = [name for name in exact.state_dict() if written.has_codes(name)]
    assert names and all("proj" in name for name in names)
    nearest = load_model(open_model(STUDENT), config, torch.float32)
    for name in names:
        weight = nearest.get_parameter(name)
        weight.copy_(round_to_codes(weight).dequantize())
    models = (exact, nearest, load_model(written, config, torch.float32))
    texts = calibration_samples(STUDENT, config.vocab_size, None, 20, 192)[12:]
    logits = [torch.cat([model(torch.tensor([ids]))[0] for ids in texts]).log_softmax(-1) for model in models]
    kl = [F.kl_div(found, logits[0], log_target=True, reduction="batchmean") for found in logits[1:]]
    print(f"\nKL to the exact student: nearest codes {kl[0]:.4g}, by inputs {kl[1]:.4g}")
    assert kl[1] < kl[0]


def test_an_int4_engine_keeps_every_code(tmp_path: Path) -> None:
    """Layers that several tensors are fused into."""
    path = make_checkpoint(tmp_path / "model", "qwen3", dtype=torch.bfloat16, num_hidden_layers=2)
    quantize_checkpoint(path, tmp_path / "int4", "int4", num_samples=2, num_tokens=64)
    checkpoint = open_model(tmp_path / "int4")
    config = read_model_config(checkpoint)
    convert_weights(checkpoint, config, torch.bfloat16, tmp_path / "weights", packed_dtype=IN_STEPS)
    specs, layers = {spec.name: spec for spec in weight_specs(config)}, linears(config)
    with safe_open(tmp_path / "weights", "pt") as file:
        for name, layer in layers.items():
            spec = specs[f"{name}.weight"]
            if "proj" not in spec.sources[0].name:
                continue
            found = unpack_codes(file.get_tensor(f"{name}.packed"), *spec.shape, layer.gated)
            scales = unpack(file.get_tensor(f"{name}.scales").view(-1, 1, 64, 1), spec.shape[0], 1, layer.gated)
            stored = [checkpoint.codes(source.name) for source in spec.sources]
            assert torch.equal(found.codes, torch.cat([codes.codes for codes in stored]))
            want = torch.cat([in_steps(codes).dequantize() for codes in stored])
            assert torch.equal(found.dequantize() * scales, want)
            exact = torch.cat([checkpoint.read(source.name, source.shape).float() for source in spec.sources])
            torch.testing.assert_close(found.dequantize() * scales, exact, rtol=STEP_ROUNDING, atol=0)


def test_the_command_writes_a_checkpoint_of_4_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how many layers are done, which are rounded one after the other."""
    monkeypatch.setattr(display, "PERIOD_S", 0.0)
    path = make_checkpoint(tmp_path / "model", "qwen3", dtype=torch.bfloat16, num_hidden_layers=2)
    asked = ["quantize", str(path), "-o", str(tmp_path / "int4"), "--recipe", "int4"]
    assert main([*asked, "--num-samples", "2", "--num-tokens", "400"]) == 0
    said = capsys.readouterr()
    assert "recipe int4" in said.out and "kvforge: 1 of 2 layers\n" in said.err
    written, original = open_model(tmp_path / "int4"), load_file(path / "model.safetensors")
    for name, tensor in original.items():
        read = written.read(name, tuple(tensor.shape))
        if "proj" in name:
            assert written.has_steps(name) and not written.has_zero_points(name)
        else:
            assert torch.equal(read, tensor)
    assert int4_dtype(written, read_model_config(written)) == "int4"
    assert (tmp_path / "int4" / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    assert main([*asked]) == 1 and "int4" in capsys.readouterr().err  # it is there already
    assert main(["quantize", str(tmp_path / "int4"), "-o", str(tmp_path / "again"), "--recipe", "int4"]) == 1
    assert "is quantized already" in capsys.readouterr().err


def test_force_replaces_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", str(STUDENT), "-o", str(tmp_path / "int4"), "--recipe", "int4"]
    command += ["--num-samples", "2", "--num-tokens", "32", "-q"]
    assert main(command) == 0
    (tmp_path / "int4" / "old.txt").touch()
    capsys.readouterr()
    assert main(command) == 1
    assert "add --force to replace it" in capsys.readouterr().err
    assert main([*command, "--force", "--calibration", str(tmp_path / "int4" / "old.txt")]) == 1
    assert "old.txt, which is read" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert not (tmp_path / "int4" / "old.txt").exists() and (tmp_path / "int4" / "config.json").is_file()
