"""Reading the rotary embedding's parameters from a Hugging Face ``config.json``."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.errors import ModelError
from model_defs.fields import MAX_FIELD, number, optional_flag, require_int
from model_defs.rope_config import RopeConfig

LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": LLAMA3_FIELDS,
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
"""The kinds of scaling, and the fields that each cannot do without."""

KEYS = frozenset({
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "factor"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "truncate"),
})  # fmt: skip
"""What is read of ``rope_scaling`` and ``rope_parameters``: all that transformers reads of them."""

LARGEST_THETA, LARGEST_FACTOR = 1e15, 1e6
"""Far above those of any model; angles of the last position are finite float32 within them."""


def rope_from_hf(hf: Mapping[str, Any], *, may_be_partial: bool = False, interleaved: bool = False) -> RopeConfig:
    """Read RoPE parameters from a Hugging Face config, in its old (``rope_theta`` + ``rope_scaling``) or new
    (``rope_parameters``) spelling.

    Scaling without ``original_max_position_embeddings`` was trained at ``max_position_embeddings``. ``may_be_partial``
    and ``interleaved`` say what the family's heads do.

    Raises:
        ModelError: the scaling type is not one of ``NEEDED``, its parameters are missing, differ between layer types or
            are no numbers, or rotation is partial where the family's is not.
    """
    parameters = _parameters(hf)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in NEEDED:
        *first, last = NEEDED
        raise ModelError(
            f"RoPE scaling {reprlib.repr(kind)} is not supported; supported are {', '.join(first)} and {last}."
        )
    for name in NEEDED[kind]:
        if name not in parameters:
            raise ModelError(f"RoPE scaling {kind!r} needs {name}, which the configuration lacks.")
    original, max_position = _original_length(hf, parameters, kind), _max_position(hf)
    if kind in ("yarn", "longrope") and parameters.get("factor") is None:
        parameters["factor"] = max(max_position / original, 1 / LARGEST_FACTOR)
    scaling = {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **parameters}
    rope = RopeConfig(
        theta=number(parameters.get("rope_theta", hf.get("rope_theta", 10000.0)), "rope_theta", 1.0, LARGEST_THETA),
        kind=kind,
        factor=_factor(scaling["factor"], "factor"),
        low_freq_factor=_factor(scaling["low_freq_factor"], "low_freq_factor"),
        high_freq_factor=_factor(scaling["high_freq_factor"], "high_freq_factor"),
        original_max_position=original,
        partial=_partial(parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor")), may_be_partial),
        interleaved=interleaved,
        **_yarn(parameters) if kind == "yarn" else _longrope(parameters, original) if kind == "longrope" else {},
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError(
            f"high_freq_factor is {rope.high_freq_factor} in config.json; it must be above low_freq_factor."
        )
    if kind == "yarn" and rope.theta == 1.0:
        raise ModelError("RoPE scaling 'yarn' needs a rope_theta above 1.")
    return rope.for_length(max_position)


def _parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``rope_scaling``, which goes before all of ``rope_parameters`` as in transformers, or of those."""
    for field in ("rope_scaling", "rope_parameters"):
        given = hf.get(field) or {}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise ModelError(f"{field} must be one object of numbers for all layers, found {reprlib.repr(given)}.")
    return dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})


def max_position_of(hf: Mapping[str, Any], rope: RopeConfig) -> int:
    """Return how many positions the model has: ``max_position_embeddings``, which YaRN's ``factor`` may extend."""
    given = _max_position(hf)
    if rope.kind != "yarn":
        return given
    extended = max(given, int(rope.original_max_position * rope.factor))
    return require_int({"max_position_embeddings": extended}, "max_position_embeddings")


def _max_position(hf: Mapping[str, Any]) -> int:
    return require_int(hf, "max_position_embeddings")


def _original_length(hf: Mapping[str, Any], parameters: Mapping[str, Any], kind: str) -> int:
    """The context before scaling; of YaRN and longrope, a field beside the scaling's has the last word."""
    name = "original_max_position_embeddings"
    trained = {name: hf.get(name, hf.get("max_position_embeddings"))}
    fields = {**trained, **parameters}
    if kind in ("yarn", "longrope") and hf.get(name) is not None:
        fields = trained
    return require_int(fields, name)


def _factor(value: object, name: str) -> float:
    return number(value, name, 1 / LARGEST_FACTOR, LARGEST_FACTOR)


def _partial(value: object, may_be_partial: bool) -> float:
    if value is None:
        return 1.0
    partial = number(value, "partial_rotary_factor", -math.inf, math.inf)
    if may_be_partial:
        return number(value, "partial_rotary_factor", 0.0, 1.0)
    if partial != 1.0:
        raise ModelError("Partial rotary embedding is not supported in this family; partial_rotary_factor must be 1.")
    return 1.0


def _yarn(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's ramp and amplitude; zeros and nulls of the ramp stand for its defaults."""
    betas = {"beta_fast": 32.0, "beta_slow": 1.0}
    amplitude, scales = parameters.get("attention_factor"), [parameters.get(n) for n in ("mscale", "mscale_all_dim")]
    factor = _factor(parameters["factor"], "factor")
    if amplitude is not None:
        amplitude = _factor(amplitude, "attention_factor")
    elif all(scales):
        upper, lower = (_growth(factor, _factor(scale, "mscale")) for scale in scales)
        amplitude = upper / lower
    else:
        amplitude = _growth(factor, 1.0)
    return {
        "amplitude": amplitude,
        "truncate": optional_flag(parameters, "truncate", True),
        **{name: _factor(parameters.get(name) or otherwise, name) for name, otherwise in betas.items()},
    }


def score_growth(hf: Mapping[str, Any]) -> float:
    """Return what scores are multiplied by where ``mscale_all_dim`` of YaRN says so: its amplitude, squared."""
    parameters = _parameters(hf)
    scale = parameters.get("mscale_all_dim")
    if not scale or parameters.get("rope_type", parameters.get("type", "default")) != "yarn":
        return 1.0
    return _growth(_factor(parameters["factor"], "factor"), _factor(scale, "mscale_all_dim")) ** 2


def _growth(factor: float, scale: float) -> float:
    """YaRN's amplitude for a context that is ``factor`` times the original one (arXiv 2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(parameters: Mapping[str, Any], original: int) -> dict[str, Any]:
    """Longrope's factors, and its amplitude (arXiv 2402.13753); short and long sequences have one amplitude."""
    for name in ("short_mscale", "long_mscale"):
        if parameters.get(name) is not None:
            raise ModelError(f"RoPE scaling 'longrope' with {name} is not supported; only attention_factor is.")
    factor, amplitude = _factor(parameters["factor"], "factor"), parameters.get("attention_factor")
    if amplitude is not None:
        amplitude = _factor(amplitude, "attention_factor")
    elif factor <= 1:
        amplitude = 1.0
    elif original == 1:
        raise ModelError("RoPE scaling 'longrope' needs original_max_position_embeddings above 1.")
    else:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "amplitude": amplitude,
        "short_factors": _factors(parameters, "short_factor"),
        "long_factors": _factors(parameters, "long_factor"),
    }


def _factors(parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = parameters[name]
    if not isinstance(values, list) or len(values) > MAX_FIELD["head_dim"]:
        raise ModelError(f"{name} is {reprlib.repr(values)} in config.json; it must be a list of numbers.")
    return tuple(_factor(value, name) for value in values)
