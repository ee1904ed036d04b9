"""By which text the weights of an engine are rounded: the package's, the user's, or by none."""

import dataclasses
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvforge.checkpoint import Checkpoint
from kvforge.common.errors import BuildError, CheckpointWarning, KvforgeError
from kvforge.common.number_formats import INT4_WEIGHTS, QUANTIZED_WEIGHT_BYTES
from kvforge.compiler.convert import EMBEDDING, basis_of, fuse, has_codes
from kvforge.compiler.layer_pass import Progress, Read
from kvforge.compiler.mixed_weights import choose_int8_layers
from kvforge.compiler.options import BuildOptions, ResolvedOptions
from kvforge.compiler.round_by_text import round_by_text
from kvforge.tokenization.calibration import PACKAGE_TEXT, calibration_samples
from model_defs import ModelConfig
from model_defs.weights import weight_specs

AUTO, NONE, PACKAGE = "auto", "none", "package"
"""What an option may be besides the path of a text: the package's for a model that is not too large, whose layers above
a cut keep no state, and whose tokenizer takes it."""

MAX_AUTOMATIC_PARAMETERS = {"int8": 5 * 10**8, **dict.fromkeys(INT4_WEIGHTS, 2 * 10**9)}
"""Beyond, rounding by a text takes minutes on a few cores for what little int8 loses, and many minutes for int4, and is
done where it is asked for."""

NUM_SAMPLES, NUM_TOKENS = 8, 512


@dataclass(frozen=True)
class Calibration:
    """Token ids to round by, and the manifest's name of their text."""

    samples: list[list[int]]
    name: str

    def round(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        options: ResolvedOptions,
        progress: Progress = lambda done, total: None,
    ) -> dict[str, dict[str, Tensor]]:
        """Return the packed tensors of the engine's linear layers, as ``round_by_text`` does."""
        return round_by_text(config, options, _reader(checkpoint, config, options), self.samples, progress)

    def mix(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        options: ResolvedOptions,
        bits: float | None,
        progress: Progress = lambda done, total: None,
    ) -> ResolvedOptions:
        """Return the options with the int8 layers that ``choose_int8_layers`` gives, or as they are without ``bits``.

        Raises BuildError for fewer bits than all layers in 4 bits have.
        """
        if bits is None:
            return options
        read = _reader(checkpoint, config, options)
        chosen = choose_int8_layers(config, options, read, self.samples, bits, progress)
        return dataclasses.replace(options, int8_layers=chosen)


def _reader(checkpoint: Checkpoint, config: ModelConfig, options: ResolvedOptions) -> Read:
    specs = {spec.name: spec for spec in weight_specs(config)}
    basis = basis_of(checkpoint, config, options.packed_dtype)

    def read(name: str, is_head: bool) -> Tensor:
        return fuse(checkpoint, specs[name], torch.float32, basis, is_head and name == EMBEDDING)

    return read


def may_calibrate(options: BuildOptions) -> bool:
    """Return whether an engine with these options can be rounded by a text."""
    return options.calibration != NONE and options.weight_dtype in QUANTIZED_WEIGHT_BYTES


def check_calibration(options: BuildOptions) -> None:
    """Raise BuildError where a text is given for weights that are not rounded, or none for those that are mixed."""
    if options.calibration not in (AUTO, NONE) and not may_calibrate(options):
        raise BuildError(
            f"--calibration is for weights that are rounded, and --weight-dtype {options.weight_dtype} rounds none; "
            f"give --weight-dtype {' or '.join(QUANTIZED_WEIGHT_BYTES)}, or leave it out."
        )
    bits = options.weight_bits
    if bits is not None and options.weight_dtype not in INT4_WEIGHTS:
        raise BuildError(
            f"--weight-bits is for --weight-dtype {' or '.join(INT4_WEIGHTS)}, not {options.weight_dtype}; give one of "
            "these, or leave it out."
        )
    if bits is not None and not 4 < bits < 8:
        raise BuildError(f"--weight-bits is {bits:g}; it must be more than 4 and less than 8.")
    if bits is not None and options.calibration == NONE:
        raise BuildError("--weight-bits chooses layers by a calibration text; leave --calibration none out.")


def calibration_of(
    options: BuildOptions, resolved: ResolvedOptions, config: ModelConfig, checkpoint: Checkpoint
) -> Calibration | None:
    """Return what to round the engine's weights by; None to round them to the nearest, or not at all.

    Raises:
        BuildError: a text for weights that the checkpoint has in 4 bits already.
        KvforgeError: the text that was asked for cannot be read, or is too short.
        CheckpointError: the tokenizer gives tokens of it that the model has not.
    """
    if not may_calibrate(options):
        return None
    keeps_codes = resolved.quantized_weights in INT4_WEIGHTS and has_codes(checkpoint, config)
    is_too_large = _num_parameters(config) > MAX_AUTOMATIC_PARAMETERS[options.weight_dtype]
    is_asked, flag = options.calibration != AUTO or options.weight_bits is not None, "--calibration"
    if not is_asked and (keeps_codes or is_too_large or config.upper_linear):
        return None
    if options.weight_bits is not None:
        flag = "--weight-bits"
    if config.upper_linear:
        raise BuildError(
            f"{checkpoint.path} has layers above a cut that keep a state, which of every token would be in memory; "
            f"leave {flag} out."
        )
    if keeps_codes:
        raise BuildError(
            f"{checkpoint.path} has weights in 4 bits already, which an int4 engine keeps as they are; leave {flag} "
            "out."
        )
    text = _text(options)
    name = PACKAGE if text == PACKAGE_TEXT else _hash(text)
    num_tokens = min(NUM_TOKENS, config.max_position)
    try:
        samples = calibration_samples(checkpoint.folder, config.vocab_size, text, NUM_SAMPLES, num_tokens)
    except KvforgeError as error:
        if is_asked:
            raise
        warnings.warn(
            f"Weights of {checkpoint.path} are rounded to the nearest, not by the text that comes with kvforge. "
            f"{error}",
            CheckpointWarning,
            stacklevel=2,
        )
        return None
    return Calibration(samples, name)


def text_hash(options: BuildOptions) -> str | None:
    """Return the SHA-256 of the text that the weights of an engine with these options may be rounded by; None where
    there is none. Raises KvforgeError where it cannot be read."""
    return _hash(_text(options)) if may_calibrate(options) else None


def _text(options: BuildOptions) -> Path:
    return PACKAGE_TEXT if options.calibration in (AUTO, PACKAGE) else Path(options.calibration)


def _hash(text: Path) -> str:
    try:
        return hashlib.sha256(text.read_bytes()).hexdigest()
    except OSError as error:
        raise KvforgeError(f"The calibration text {text} cannot be read ({error.strerror}).") from None


def _num_parameters(config: ModelConfig) -> int:
    return sum(spec.num_parameters for spec in weight_specs(config))
