"""The ``config.json`` and ``generation_config.json`` that a GGUF file's metadata stand for."""

import reprlib
from collections.abc import Mapping
from typing import Any

from kvforge.checkpoint.gguf.derived_tensors import GgufPiece
from kvforge.checkpoint.gguf.header import Header
from kvforge.checkpoint.gguf.vocabulary import ending_tokens
from kvforge.common.errors import CheckpointError
from model_defs import Family, families

_INTEGERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""What every file has, and what config.json calls it."""

_KV_HEADS, _HEAD, _VALUE = "attention.head_count_kv", "attention.key_length", "attention.value_length"
_ROTATED, _THETA, _SCALING = "rope.dimension_count", "rope.freq_base", "rope.scaling."
_EPS = "attention.layer_norm_rms_epsilon"
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
_READ_SCALING = ("type", "factor", "attn_factor", "original_context_length", *_YARN)
_READ = (
    *(*_INTEGERS, _KV_HEADS, _HEAD, _VALUE, _ROTATED, _THETA, _EPS),
    *(f"{_SCALING}{name}" for name in _READ_SCALING),
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "nextn_predict_layers": (0,),
    "expert_shared_count": (0,),
    "expert_gating_func": (1,),
    "expert_weights_norm": (True,),
}
"""Keys that say something of other models, and the values with which they say nothing."""

_IGNORED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
"""Keys that change nothing: the tensors say how large the vocabulary is and how they lie."""

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Defaults of requests below ``general.sampling``, and what generation_config.json calls them."""

FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
FREQUENCIES = "rope_freqs.weight"
"""Tensors that say what the frequencies of rotation are divided by."""


def family_of_file(header: Header) -> Family:
    """Return the family of a file's model; raises CheckpointError where llama.cpp's architecture is none of ours."""
    kind, architecture = header.metadata.get("general.type", "model"), header.metadata.get("general.architecture")
    if kind != "model":
        raise CheckpointError(f"{header.path} holds no model but is of the kind {reprlib.repr(kind)}; give the model.")
    known = [family for family in families().values() if family.gguf is not None]
    found = [family for family in known if family.gguf and family.gguf.architecture == architecture]
    if not found:
        names = ", ".join(sorted({family.gguf.architecture for family in known if family.gguf}))
        what = f"has a model of {reprlib.repr(architecture)}"
        what = "does not say its architecture" if architecture is None else what
        raise CheckpointError(f"{header.path} {what}, which is not supported as GGUF; supported are {names}.")
    has_experts = bool(header.metadata.get(f"{architecture}.expert_count"))
    for family in found:
        if family.gguf is not None and family.gguf.has_experts == has_experts:
            return family
    wrong = "has a mixture of experts" if has_experts else "has no experts"
    raise CheckpointError(f"{header.path} is a model of {architecture!r} that {wrong}, which is not supported.")


def hf_config(header: Header, family: Family) -> dict[str, Any]:
    """Return the contents of the ``config.json`` that the file stands for.

    Raises:
        CheckpointError: a key is missing, of the wrong kind, or one that the family does not obey.
    """
    keys = _keys(header, family)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if (embeddings := tensors.get("token_embd.weight")) is None or len(embeddings.shape) != 2:
        raise CheckpointError(f"{header.path} has no matrix token_embd.weight; the file is incomplete.")
    hf: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": embeddings.shape[0],
        **{name: keys[key] for key, name in _INTEGERS.items()},
        "num_key_value_heads": keys[_KV_HEADS],
        "head_dim": keys[_HEAD],
        "rms_norm_eps": keys[_EPS],
        "rope_theta": keys.get(_THETA, 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float32" if embeddings.kind == "F32" else "bfloat16",
    }
    if (rotated := _whole(header, _prefix(header) + _ROTATED, keys.get(_ROTATED, keys[_HEAD]))) != keys[_HEAD]:
        hf["partial_rotary_factor"] = rotated / keys[_HEAD]
    for module, flag in (("attn_q", "attention_bias"), ("ffn_up", "mlp_bias")):
        if f"blk.0.{module}.bias" in tensors:
            hf[flag] = True
    if scaling := _rope_scaling(header, keys):
        hf["rope_scaling"] = scaling
    assert family.gguf is not None
    own = family.gguf.fields(keys)
    if "rope_scaling" in own:
        own["rope_scaling"] = {**scaling, **own["rope_scaling"]}
    return {**hf, **_tokens(header), **own}


def generation_config(header: Header) -> dict[str, Any]:
    """Return the defaults of requests that a file has, as in ``generation_config.json``."""
    found = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}


def _keys(header: Header, family: Family) -> dict[str, Any]:
    """The metadata below the architecture, with what all files must have."""
    form = family.gguf
    assert form is not None
    prefix = _prefix(header)
    found = {key.removeprefix(prefix): v for key, v in header.metadata.items() if key.startswith(prefix)}
    for key, value in found.items():
        if key in (*_READ, *form.reads, *_IGNORED) or (key in _NEUTRAL and value in _NEUTRAL[key]):
            continue
        raise CheckpointError(
            f"{header.path} says {prefix}{key} {reprlib.repr(value)}, which is not supported in a model of "
            f"{form.architecture!r}."
        )
    for key in (*_INTEGERS, _EPS):
        if key not in found:
            raise CheckpointError(f"{header.path} has no {prefix}{key}; convert the model again.")
    for key in (*_INTEGERS, _KV_HEADS):
        found[key] = _of_all_layers(header, prefix + key, found.get(key, found["attention.head_count"]))
    if found["attention.head_count"] < 1 or found["embedding_length"] < 1:
        raise CheckpointError(f"{header.path} has a model without heads; it is damaged, download it again.")
    found.setdefault(_HEAD, found["embedding_length"] // found["attention.head_count"])
    if (size := found.get(_VALUE, found[_HEAD])) != found[_HEAD] or not isinstance(size, int) or size < 1:
        raise CheckpointError(
            f"{header.path} says {prefix}{_VALUE} {reprlib.repr(size)} beside {prefix}{_HEAD} "
            f"{reprlib.repr(found[_HEAD])}; heads of K and V must have one size."
        )
    return found


def _prefix(header: Header) -> str:
    """What the keys of a file's model begin with."""
    return f"{header.metadata['general.architecture']}."


def _of_all_layers(header: Header, key: str, value: Any) -> int:
    """A whole number, which may be given for each layer."""
    return _whole(header, key, value[0] if isinstance(value, list) and len(set(value)) == 1 else value)


def _whole(header: Header, key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(
            f"{header.path} says {key} {reprlib.repr(value)}; it must be a whole number, one for all layers."
        )
    return value


def _rope_scaling(header: Header, keys: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json calls ``rope_scaling``. Frequencies that are divided one by one are those of ``longrope``."""
    given = {name: keys[f"{_SCALING}{name}"] for name in _READ_SCALING if f"{_SCALING}{name}" in keys}
    kind = given.get("type", "none")
    factors = _factors(header)
    if factors:
        if kind not in ("none", "longrope"):
            raise CheckpointError(f"{header.path} scales its rotation both by {kind!r} and by tensors of factors.")
        original = given.get("original_context_length", keys["context_length"])
        scaling = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original, "factor": 1.0}
        return {**scaling, "attention_factor": given.get("attn_factor", 1.0)}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{header.path} says {_prefix(header)}{_SCALING}type {reprlib.repr(kind)}; supported are linear, yarn, and "
            "longrope with its tensors of factors."
        )
    if given.get("attn_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{header.path} says {_prefix(header)}{_SCALING}attn_factor, which is supported with longrope alone."
        )
    scaling = {"rope_type": kind, "factor": given.get("factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = given.get("original_context_length", keys["context_length"])
        scaling |= {name: given[key] for key, name in _YARN.items() if key in given}
    return scaling


def _factors(header: Header) -> dict[str, list[float]]:
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = dict.fromkeys(FACTORS, FREQUENCIES) if FREQUENCIES in tensors else FACTORS
    missing = [name for name in names.values() if name not in tensors]
    if len(missing) == len(names):
        return {}
    if missing:
        raise CheckpointError(f"Tensor {missing[0]} is missing from {header.path}; the file is incomplete.")
    found = {}
    for field, name in names.items():
        numbers = GgufPiece(tensors[name]).read().float()
        if numbers.dim() != 1:
            raise CheckpointError(f"Tensor {name} in {header.path} must be a vector, not {list(numbers.shape)}.")
        found[field] = numbers.tolist()
    return found


def _tokens(header: Header) -> dict[str, Any]:
    """The tokens that begin and end texts."""
    begin, end = header.metadata.get("tokenizer.ggml.bos_token_id"), ending_tokens(header)
    return {"bos_token_id": begin, "eos_token_id": end or None}
