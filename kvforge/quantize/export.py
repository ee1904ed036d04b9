"""Calibrates a checkpoint: with NVIDIA ModelOpt, whose Hugging Face export is written, or for weights in 4 bits."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from kvforge.checkpoint import Checkpoint, kv_scales
from kvforge.checkpoint.copy_files import copy_files
from kvforge.checkpoint.finite import check_finite
from kvforge.checkpoint.model import (
    check_has_no_states,
    check_is_not_blind,
    check_weights,
    open_model,
    read_model_config,
)
from kvforge.checkpoint.output import check_output
from kvforge.common.checkpoint_files import copy_tokenizer_files
from kvforge.common.errors import CheckpointError, KvforgeError, first_line
from kvforge.common.extras import import_failed
from kvforge.common.staging import staging_directory
from kvforge.quantize.int4 import quantize_layers
from kvforge.quantize.int4_checkpoint import write_int4
from kvforge.swiftkv import load_model
from kvforge.tokenization.calibration import calibration_samples
from model_defs import ModelConfig

RECIPES = {
    "fp8": "FP8 weights, scales of the layers' inputs, and scales of an FP8 KV cache",
    "fp8-kv": "scales of an FP8 KV cache; weights stay as they are",
    "int4": "weights in 4 bits in groups of 32 inputs, rounded by the layers' inputs (GPTQ)",
}
_DTYPES = {"F32": torch.float32, "F64": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class QuantizeSummary:
    """What was written: ``weight_bytes`` is the size of the safetensors files, ``kv_scales`` (k, v) per owner."""

    output: str
    recipe: str
    model_type: str
    num_samples: int
    num_tokens: int
    weight_bytes: int
    kv_scales: tuple[tuple[float, float], ...]


def quantize_checkpoint(
    checkpoint_path: str | Path,
    output: str | Path,
    recipe: str,
    *,
    calibration: str | Path | None = None,
    num_samples: int = 128,
    num_tokens: int = 512,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> QuantizeSummary:
    """Quantize a checkpoint, plain or SwiftKV, and write the result to ``output``.

    Calibration is over ``num_samples`` sequences of at most ``num_tokens`` tokens (the text file ``calibration``, or
    generated text). FP8's scales are the largest absolute values seen, divided by 448; ``int4`` rounds by the sums of
    products of inputs. ``output`` appears whole or not at all, with ``overwrite`` in the place of a checkpoint there.

    Raises:
        MissingToolError: a recipe needs ModelOpt (or transformers, for plain models), which is not installed.
        CheckpointError: the checkpoint cannot be read, is incomplete, not supported or quantized already, its
            tokenizer is another model's, or calibration found no usable scale.
        KvforgeError: an unknown recipe, numbers below 1, ``output`` may not be written (``check_output``), or
            unusable calibration text.
    """
    output = Path(output)
    _check_arguments(recipe, num_samples, num_tokens)
    text = None if calibration is None else Path(calibration)
    check_output(output, [Path(checkpoint_path), text], overwrite)
    checkpoint, config = _open(Path(checkpoint_path))
    if recipe != "int4" and checkpoint.side_folder is not None:
        raise CheckpointError(
            f"{checkpoint.path} is a GGUF file, which this recipe does not take; give --recipe int4, or rewire it "
            "first."
        )
    if recipe == "int4" or config.latent is not None:
        check_has_no_states(checkpoint)
    num_tokens = min(num_tokens, config.max_position)
    samples = calibration_samples(checkpoint.folder, config.vocab_size, text, num_samples, num_tokens)
    if recipe == "int4":
        return _quantize_int4(checkpoint, config, output, samples, overwrite, progress)
    if checkpoint.is_text_part:
        raise CheckpointError(
            f"{checkpoint.path} has parts for images or audio besides its text model, which this recipe does not take; "
            "give --recipe int4, or rewire it first."
        )
    if config.latent is not None:
        raise CheckpointError(
            f"{checkpoint.path} keeps latents in place of K and V, which have no calibrated scales; give --recipe int4."
        )
    with _quiet():
        mtq, export_hf_checkpoint = _modelopt()
        model = _load(checkpoint, config)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        with staging_directory(output, replace=overwrite) as staging:
            _quantize(mtq, model, recipe, samples, progress)
            try:
                export_hf_checkpoint(model, export_dir=staging)
            except SafetensorError as error:  # how a full disk reads there
                raise KvforgeError(f"{output} was not written ({first_line(error)}); free space there.") from None
            copy_tokenizer_files(checkpoint.folder, staging)
            scales = _check_export(staging, checkpoint, config)
            files = list(staging.glob("*.safetensors"))
            for file in files:  # safetensors writes them for the owner alone
                file.chmod((staging / "config.json").stat().st_mode & 0o777)
            size = sum(file.stat().st_size for file in files)
    return QuantizeSummary(
        output=str(output),
        recipe=recipe,
        model_type=str(checkpoint.hf_config.get("model_type")),
        num_samples=len(samples),
        num_tokens=sum(len(ids) for ids in samples),
        weight_bytes=size,
        kv_scales=scales,
    )


def _quantize_int4(
    checkpoint: Checkpoint,
    config: ModelConfig,
    output: Path,
    samples: list[list[int]],
    overwrite: bool,
    progress: Progress,
) -> QuantizeSummary:
    with staging_directory(output, replace=overwrite) as staging:
        codes = quantize_layers(load_model(checkpoint, config, torch.float32), samples, progress)
        size = write_int4(checkpoint, config, codes, staging)
        copy_files(checkpoint.folder, staging)
    model_type = str(checkpoint.hf_config.get("model_type"))
    return QuantizeSummary(str(output), "int4", model_type, len(samples), sum(map(len, samples)), size, ())


def _check_arguments(recipe: str, num_samples: int, num_tokens: int) -> None:
    if recipe not in RECIPES:
        raise KvforgeError(f"Recipe {recipe!r} is unknown; choose from {', '.join(RECIPES)}.")
    if num_samples < 1 or num_tokens < 16:
        raise KvforgeError("--num-samples must be at least 1 and --num-tokens at least 16.")


def _open(path: Path) -> tuple[Checkpoint, ModelConfig]:
    checkpoint = open_model(path)
    if checkpoint.quantization is not None:
        raise CheckpointError(f"{path} is quantized already ({checkpoint.quantization}); give the original.")
    config = read_model_config(checkpoint)
    check_is_not_blind(checkpoint)
    check_weights(checkpoint, config)  # transformers would make up what is missing
    return checkpoint, config


def _modelopt() -> tuple[Any, Any]:
    try:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
    except Exception as error:  # of packages that do not fit each other, anything
        raise import_failed("kvforge quantize needs NVIDIA ModelOpt", "modelopt", error) from None
    return mtq, export_hf_checkpoint


def _load(checkpoint: Checkpoint, config: ModelConfig) -> nn.Module:
    if config.is_swiftkv:
        from kvforge.quantize.modelopt_attention import register_attention
        from kvforge.quantize.swiftkv_model import load_swiftkv

        register_attention()
        dtype = _DTYPES.get(checkpoint.dtype("model.embed_tokens.weight"), torch.bfloat16)
        return load_swiftkv(checkpoint, config, dtype)
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging
    except Exception as error:
        need = f"Quantizing a {config.model_type} checkpoint needs transformers"
        raise import_failed(need, "modelopt", error) from None
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype="auto", local_files_only=True).eval()
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise CheckpointError(f"transformers cannot load {checkpoint.path}: {first_line(error)}.") from None
    for name, parameter in model.named_parameters():
        check_finite(parameter, name, checkpoint.path)
    return model


def _quantize(mtq: Any, model: nn.Module, recipe: str, samples: list[list[int]], progress: Progress) -> None:
    base = mtq.FP8_DEFAULT_CFG
    rules = list(base["quant_cfg"]) if recipe == "fp8" else [{"quantizer_name": "*", "enable": False}]
    settings = {"quant_cfg": rules + list(mtq.FP8_KV_CFG["quant_cfg"]), "algorithm": "max"}

    def forward(quantized: nn.Module) -> None:
        device = next(quantized.parameters()).device
        with torch.inference_mode():
            for done, ids in enumerate(samples):
                progress(done, len(samples))
                quantized(torch.tensor([ids], device=device))
        progress(len(samples), len(samples))

    try:
        mtq.quantize(model, settings, forward_loop=forward)
    except AssertionError as error:  # ModelOpt's word for a NaN among the largest values
        raise CheckpointError(
            f"Calibration met numbers that are not finite ({first_line(error)}); the weights are damaged, or too large "
            "for their dtype."
        ) from None


def _check_export(staging: Path, original: Checkpoint, config: ModelConfig) -> tuple[tuple[float, float], ...]:
    """Return the cache's scales. Raises CheckpointError where no engine can be built of it, or a scale is unusable: a
    matrix of zeros has none."""
    written = open_model(staging)
    try:
        check_weights(written, config)
    except CheckpointError as error:
        raise CheckpointError(
            f"ModelOpt writes {original.path} so that no engine can be built of it ({error}) Give another --recipe."
        ) from None
    for name in written.file_of_tensor:
        if not name.endswith("_scale"):
            continue
        values = written.read_raw(name, finite=False).float()
        if not bool((values.isfinite() & (values > 0)).all()):
            raise CheckpointError(
                f"{name} of {original.path} would not be a positive number: what it scales is zero in all of the "
                "calibration, or not finite; correct the checkpoint or give another --calibration."
            )
    return kv_scales(written, config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what ModelOpt and transformers print, warn and log below an error; restores all of it."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
