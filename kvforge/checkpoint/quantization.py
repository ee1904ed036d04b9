"""What a checkpoint says of its quantization: ModelOpt's exports in either of their two places, other libraries' in
``quantization_config`` of config.json (``kvforge.checkpoint.formats``).

``hf_quant_config.json`` holds ``{"quantization": {"quant_algo", "kv_cache_quant_algo", …}}``; newer exports put the
same into ``config.json`` as ``quantization_config`` with ``quant_method: modelopt``, where the cache is either
``kv_cache_quant_algo`` or ``kv_cache_scheme``. compressed-tensors has the latter, too.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.checkpoint.formats import FORMATS, WeightFormat
from kvforge.checkpoint.mxfp4 import QUANT_METHOD as MXFP4
from kvforge.common.checkpoint_files import QUANTIZATION
from kvforge.common.errors import CheckpointError

WEIGHT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
KV_CACHE_ALGORITHMS = ("FP8", "INT8")
_KV_SCHEMES = {"float": "FP8", "int": "INT8"}
_KV_SCHEME = {"strategy": "tensor", "symmetric": True}


@dataclass(frozen=True)
class Quantization:
    """ModelOpt's names of what was done: ``weight_algo`` is one of ``WEIGHT_ALGORITHMS`` or None. ``kv_cache_algo`` is
    one of ``KV_CACHE_ALGORITHMS``, another name or scheme, which no engine has and a build must be told to leave out,
    or None. ``weight_format`` is another library's."""

    weight_algo: str | None = None
    kv_cache_algo: str | None = None
    weight_format: WeightFormat | None = None

    def __str__(self) -> str:
        weights = self.weight_algo or (self.weight_format.name if self.weight_format else "unquantized")
        return f"weights {weights}, KV cache {self.kv_cache_algo or 'unquantized'}"


def read_quantization(
    path: Path, hf_config: Mapping[str, Any], quant_config: Mapping[str, Any] | None
) -> Quantization | None:
    """Return the quantization of the checkpoint at ``path``; None where nothing is quantized.

    ``hf_config`` is config.json, ``quant_config`` hf_quant_config.json or None.

    Raises:
        CheckpointError: another library's format, an algorithm that is not supported, or two places (two parts of
            config.json among them) that name different ones; what only one of them names is taken from there.
    """
    embedded = hf_config.get("quantization_config")
    method = embedded.get("quant_method") if isinstance(embedded, Mapping) else None
    if method == MXFP4:  # a way to store bfloat16, which kvforge.checkpoint.stacked reads
        return None
    if isinstance(embedded, Mapping) and isinstance(method, str) and method in FORMATS:
        if quant_config is not None:
            raise CheckpointError(
                f"{path} is described by {QUANTIZATION} and by quantization_config in config.json, which are of "
                "different libraries; remove the one that does not belong to it."
            )
        weight_format = FORMATS[method](f"quantization_config in {path / 'config.json'}", embedded)
        scheme = embedded.get("kv_cache_scheme")
        return Quantization(None, None if scheme is None else _kv_algorithm(scheme), weight_format)
    found = [] if embedded is None else _from_config_json(path, embedded)
    if quant_config is not None:
        found.append((QUANTIZATION, _checked(f"{path / QUANTIZATION}", quant_config.get("quantization"))))
    merged, first = Quantization(), ""
    for source, entry in found:
        if _differ(merged.weight_algo, entry.weight_algo) or _differ(merged.kv_cache_algo, entry.kv_cache_algo):
            raise CheckpointError(
                f"{path} is described as {merged} by {first} and as {entry} by {source}; export it again."
            )
        merged = Quantization(merged.weight_algo or entry.weight_algo, merged.kv_cache_algo or entry.kv_cache_algo)
        first = first or source
    return None if merged == Quantization() else merged


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _from_config_json(path: Path, embedded: Any) -> list[tuple[str, Quantization]]:
    """Return what each part of ``quantization_config`` says, with its name."""
    where = f"quantization_config in {path / 'config.json'}"
    method = embedded.get("quant_method") if isinstance(embedded, Mapping) else embedded
    if method != "modelopt":
        raise CheckpointError(
            f"{where} says quant_method {reprlib.repr(method)}; supported are modelopt, {', '.join(FORMATS)}, so use a "
            "checkpoint of one of these or the unquantized one."
        )
    parts = [embedded]
    if embedded.get("quantization") is not None:
        parts.append(embedded["quantization"])
    found = []
    for part in parts:
        found.append(("config.json", _checked(where, part)))
        if part.get("kv_cache_scheme") is not None:
            found.append(("kv_cache_scheme", Quantization(None, _kv_algorithm(part["kv_cache_scheme"]))))
    return found


def _kv_algorithm(scheme: Any) -> str:
    """Return ModelOpt's name of a scheme: static, of 8 bits, and with one scale for a tensor; else what it says."""
    if isinstance(scheme, Mapping) and all(scheme.get(key, value) == value for key, value in _KV_SCHEME.items()):
        kind = _KV_SCHEMES.get(str(scheme.get("type")))
        if kind is not None and scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
            return kind
    if not isinstance(scheme, Mapping):
        return reprlib.repr(scheme).strip("'")
    keys = ("num_bits", "type", "strategy", "symmetric", "dynamic")
    return ", ".join(f"{key} {reprlib.repr(scheme[key])}" for key in keys if key in scheme) or "an empty scheme"


def _checked(where: str, values: Any) -> Quantization:
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{where} has no object 'quantization'; export the checkpoint again.")
    weight, kv_cache = values.get("quant_algo"), values.get("kv_cache_quant_algo")
    if weight is not None and weight not in WEIGHT_ALGORITHMS:
        raise CheckpointError(
            f"{where} quantizes the weights by {reprlib.repr(weight)}; supported are "
            f"{' and '.join(WEIGHT_ALGORITHMS)}, so export with one of these or use the unquantized checkpoint."
        )
    return Quantization(weight, None if kv_cache is None else _kv_algorithm(kv_cache))
