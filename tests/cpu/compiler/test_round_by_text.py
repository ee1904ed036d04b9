"""Weights that are rounded by what a text makes of their inputs, when an engine is built."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.errors import BuildError, CheckpointError, CheckpointWarning, KvforgeError
from kvforge.compiler import build_engine
from kvforge.compiler.calibration import PACKAGE, Calibration, calibration_of, may_calibrate
from kvforge.compiler.convert import basis_of, fuse
from kvforge.compiler.cpu_graph import dtype_of_packed, linears, packed_tensors
from kvforge.compiler.options import PACKED_DTYPES, BuildOptions, ResolvedOptions, resolve
from kvforge.compiler.round_by_text import round_by_text
from kvforge.quantize import quantize_checkpoint
from kvforge.tokenization.calibration import PACKAGE_TEXT
from model_defs import ModelConfig
from model_defs.weights import weight_specs
from plugins.packed_linear.by_inputs import round_by_inputs, round_to_bytes_by_inputs, round_to_codes_by_inputs
from plugins.packed_linear.int4 import round_to_codes
from plugins.packed_linear.packing import pack, pack_codes
from tests.support.models.checkpoints import ALL_FAMILIES, make_checkpoint
from tests.support.models.text_tokenizers import byte_level

STUDENT = Path(__file__).resolve().parents[3] / "model_defs" / "assets" / "tiny-swiftkv"
SAMPLES = [
    torch.randint(3, 320, (30 + size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (0, 9)
]
FIRST = ("layers.0.qkvz", "layers.0.bcx", "layers.0.zxbc", "layers.0.qkv")


def resolved(path: Path, **options: str) -> tuple[ModelConfig, ResolvedOptions]:
    config = read_model_config(open_model(path))
    given = BuildOptions(page_size=8, max_seq_len=64, **options)
    return config.for_length(64), resolve(given, config, "F32")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rounding", ["int8", "int4_scales", "int4_zeros"])
def test_outputs_are_nearer_than_by_the_nearest_codes(rounding: str) -> None:
    """Inputs go together, and one is always zero; int4's steps are tested with the recipe."""
    weight = normal(48, 96)
    inputs = normal(600, 12, seed=1) @ normal(12, 96, seed=2) + 0.3 * normal(600, 96, seed=3)
    inputs[:, 5] = 0
    moments = inputs.T @ inputs
    if rounding == "int8":
        found, scale = round_to_bytes_by_inputs(weight, moments), weight.abs().amax(1, keepdim=True) / 127
        assert torch.equal(found.scales, scale[:, 0])
        left, nearest = found.dequantize(), (weight / scale).round() * scale
    else:
        zeros = rounding == "int4_zeros"
        codes = round_to_codes_by_inputs(weight, moments, zeros)
        assert (codes.zeros is not None) == zeros
        left, nearest = codes.dequantize(), round_to_codes(weight, zeros).dequantize()

    def error(rounded: Tensor) -> Tensor:
        return (inputs @ (rounded - weight).T).square().sum()

    assert error(left) < 0.5 * error(nearest)


def test_without_common_inputs_bytes_are_the_nearest() -> None:
    weight = normal(70, 40)
    packed, scales = pack_codes(round_to_bytes_by_inputs(weight, torch.eye(40)), gated=True)
    expected, expected_scales = pack(weight, torch.int8, gated=True)
    assert torch.equal(packed, expected) and torch.equal(scales, expected_scales)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", sorted(ALL_FAMILIES))
def test_every_layer_of_every_family_is_rounded(family: str, weights: str, tmp_path: Path) -> None:
    """Also with tied heads. The first layer's are what its own inputs say."""
    path = make_checkpoint(tmp_path / "c", family, tie_word_embeddings=True, num_hidden_layers=2)
    check_all_layers(path, weights)


@pytest.mark.parametrize("weights", ["int8", "int4", "int4_zeros"])
def test_every_layer_above_a_cut_and_at_an_early_exit_is_rounded(weights: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", "qwen3", cut=2, group_size=2, early_exit=True, attention_bias=True)
    check_all_layers(path, weights)


def check_all_layers(path: Path, weights: str) -> None:
    checkpoint, (config, options) = open_model(path), resolved(path, weight_dtype=weights)
    told: list[tuple[int, int]] = []
    found = Calibration(SAMPLES, PACKAGE).round(
        checkpoint, config, options, lambda done, total: told.append((done, total))
    )
    dtype, specs = PACKED_DTYPES[weights], {spec.name: spec for spec in weight_specs(config)}
    layers = {n: x for n, x in linears(config).items() if not dtype_of_packed(x, dtype).is_floating_point}
    assert set(found) == set(layers)
    for name, layer in layers.items():
        shape = specs[f"{name}.weight"].shape
        expected = packed_tensors(torch.empty(shape, device="meta"), layer, dtype)
        assert {part: (x.shape, x.dtype) for part, x in found[name].items()} == {
            part: (x.shape, x.dtype) for part, x in expected.items()
        }
    assert told[-1] == (sum(layer.weight.numel() for layer in layers.values()),) * 2
    basis = basis_of(checkpoint, config, dtype)
    if config.latent is not None or config.embedding_scale != 1.0:
        return

    def read(name: str) -> Tensor:
        return fuse(checkpoint, specs[name], torch.float32, basis)

    stream = read("embed.weight")[torch.tensor([*SAMPLES[0], *SAMPLES[1]])]
    normed = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    rows = normed * read("layers.0.input_norm.weight") if config.pre_norms else stream
    rounding = {"int8": round_to_bytes_by_inputs, "int4": round_by_inputs}.get(weights)
    if rounding is not None:
        first = next(name for name in FIRST if f"{name}.weight" in specs)
        codes = rounding(read(f"{first}.weight"), rows.T @ rows)
        want = pack_codes(codes)
        same = (found[first]["packed"] == want[0]).float().mean()
        assert same > 1 - NEAR_TIES
        assert torch.equal(found[first]["scales"][0], want[1][0])


NEAR_TIES = 0.01
"""The share of bytes that may be others, where the order of float32's sums in the moments decides."""


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", num_hidden_layers=1)
    config, options = resolved(path, weight_dtype="int8")
    specs = {spec.name: spec for spec in weight_specs(config)}

    def read(name: str, is_head: bool) -> Tensor:
        """Of the first norm so large that float32 cannot hold the squares."""
        return torch.full(specs[name].shape, 1e30 if name == "layers.0.input_norm.weight" else 1.0)

    with pytest.raises(CheckpointError, match=r"inputs of layers\.0\.qkv that are not finite"):
        round_by_text(config, options, read, SAMPLES)


def test_which_text_an_engine_is_rounded_by(tmp_path: Path) -> None:
    """By the package's unless told otherwise, where weights are rounded."""
    path = make_checkpoint(tmp_path / "c", num_hidden_layers=1, dtype=torch.bfloat16)
    own = tmp_path / "text"
    own.write_text(PACKAGE_TEXT.read_text())
    names = {}
    for weights in ("auto", "int8", "int4", "int4_scales", "int4_zeros"):
        for calibration in ("auto", "none", "package", str(own)):
            options = BuildOptions(weight_dtype=weights, calibration=calibration, page_size=8)
            if weights == "auto" and calibration in ("package", str(own)):
                with pytest.raises(BuildError, match="--calibration is for weights that are rounded"):
                    build_engine(path, tmp_path / "e", options)
                continue
            found = calibration_of(options, resolve_of(path, options), *opened(path))
            assert (found is not None) == may_calibrate(options)
            names[weights, calibration] = None if found is None else found.name
            assert found is None or (len(found.samples), len(found.samples[0])) == (8, 512)
    for weights in ("int8", "int4", "int4_scales", "int4_zeros"):
        assert names[weights, "none"] is None and names[weights, "auto"] == names[weights, "package"] == PACKAGE
        assert len(names[weights, str(own)] or "") == 64
    own.write_text("short")
    options = BuildOptions(weight_dtype="int4", calibration=str(own), page_size=8)
    with pytest.raises(KvforgeError, match="has 5 tokens and one sample needs 512"):
        calibration_of(options, resolve_of(path, options), *opened(path))


def test_larger_models_are_rounded_by_a_text_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8's bound is the lower one."""
    path = make_checkpoint(tmp_path / "c", num_hidden_layers=1, dtype=torch.bfloat16)
    size = sum(spec.num_parameters for spec in weight_specs(opened(path)[0]))
    monkeypatch.setattr("kvforge.compiler.calibration.MAX_AUTOMATIC_PARAMETERS", {"int8": size - 1, "int4": size})
    for weights, calibration, is_found in (("int8", "auto", False), ("int8", "package", True), ("int4", "auto", True)):
        options = BuildOptions(weight_dtype=weights, calibration=calibration, page_size=8)
        assert (calibration_of(options, resolve_of(path, options), *opened(path)) is not None) == is_found


NOT_FOR_TEXTS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "one word": (lambda: words(None, the=1), "has 1 tokens and one sample needs 512"),
    "no unknown words": (lambda: Tokenizer(WordLevel({"the": 1})), r"fails on the calibration text .*UNK.*; give an"),
    "tokens that the model lacks": (lambda: words(Whitespace(), the=400), "gives token 400, but the model has 320"),
    "a panic": (lambda: panicking(), "fails on the calibration text .*; give another text"),
    "a long beginning": (lambda: with_beginning(512), "no room for text behind the 512 tokens"),
}


def words(pre_tokenizer: Whitespace | None, **known: int) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, **known}, unk_token="<unk>"))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def panicking() -> Tokenizer:
    """The search for the pattern exceeds its limit."""
    tokenizer = byte_level().backend
    tokenizer.pre_tokenizer = Split(Regex(r"([a-z ]+)+\d$"), "isolated")
    return tokenizer


def with_beginning(count: int) -> Tokenizer:
    tokenizer = byte_level().backend
    tokenizer.add_special_tokens(["<s>"])
    number = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single=["<s>"] * count + ["$A"], special_tokens=[("<s>", number)])
    return tokenizer


@pytest.mark.parametrize("case", NOT_FOR_TEXTS)
def test_weights_of_models_of_other_things_than_texts_are_rounded_to_the_nearest(case: str, tmp_path: Path) -> None:
    """Unless a text is asked for, which is then refused."""
    make, message = NOT_FOR_TEXTS[case]
    path = make_checkpoint(tmp_path / "c", num_hidden_layers=1, dtype=torch.bfloat16)
    make().save(str(path / "tokenizer.json"))

    def found(calibration: str) -> Calibration | None:
        options = BuildOptions(weight_dtype="int8", calibration=calibration, page_size=8)
        return calibration_of(options, resolve_of(path, options), *opened(path))

    nearest = "rounded to the nearest, not by the text that comes with kvforge. "
    with pytest.warns(CheckpointWarning, match=f"{nearest}.*{message}"):
        assert found("auto") is None
    with pytest.raises(KvforgeError, match=message):
        found("package")


def test_codes_of_a_checkpoint_are_not_rounded_again(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", num_hidden_layers=1, dtype=torch.bfloat16)
    quantize_checkpoint(path, tmp_path / "int4", "int4", num_samples=2, num_tokens=400)
    options = BuildOptions(weight_dtype="int4", page_size=8)
    assert calibration_of(options, resolve_of(tmp_path / "int4", options), *opened(tmp_path / "int4")) is None
    options = BuildOptions(weight_dtype="int4", page_size=8, calibration="package")
    with pytest.raises(BuildError, match="has weights in 4 bits already"):
        calibration_of(options, resolve_of(tmp_path / "int4", options), *opened(tmp_path / "int4"))


def opened(path: Path):
    checkpoint = open_model(path)
    return read_model_config(checkpoint), checkpoint


def resolve_of(path: Path, options: BuildOptions) -> ResolvedOptions:
    return resolve(options, read_model_config(open_model(path)), "BF16")
