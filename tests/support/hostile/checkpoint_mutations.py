"""Checkpoints with one thing wrong, from a seed: a field of a JSON file, or the header of the weights."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NAN, INF = float("nan"), float("inf")
VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 10**9, 2**31, 2**63, 10**30, -(10**30), 10**400, 0.5, 1e-300, 1e300, NAN, INF, -INF),
    *(None, True, False, "", "1", "nan", "\ud800", "x" * 10**5, [], [1, [2, [3]]], [None] * 10**5, {}, {"a": {"b": 1}}),
)
FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "hidden_act", "attention_bias"),
    *("mlp_bias", "tie_word_embeddings", "swiftkv", "num_key_value_layers", "key_value_group_size", "early_exit"),
    *("bos_token_id", "eos_token_id", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("quantization_config", "torch_dtype", "dtype", "architectures"),
)
ROPE = ("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")
QUANTIZATION = ("quant_method", "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "quantization")
OTHER_FILES = {
    "generation_config.json": ("eos_token_id", "bos_token_id", "temperature"),
    "tokenizer_config.json": ("bos_token", "eos_token", "chat_template", "added_tokens_decoder"),
    "tokenizer.json": ("version", "model", "decoder", "added_tokens", "pre_tokenizer", "normalizer", "post_processor"),
    "hf_quant_config.json": ("quantization",),
    "model.safetensors.index.json": ("weight_map", "metadata"),
}
BYTES = (b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"a": ' * 10**5, b"[" * 10**5, b"{}" + b" " * 100)

SCALES: tuple[Any, ...] = (*(NAN, INF, -1.0, 0.0, 1e-40, 1e38, 0.5), [], [1.0, 2.0], [[0.5]])
SCALE_DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)

Mutation = tuple[str, Callable[[Path], object]]
"""What is wrong, and the function that makes it so in a checkpoint's directory."""


def mutation(rng: random.Random) -> Mutation:
    """Return one mutation; all kinds take their turn."""
    return rng.choice((_config_field, _config_field, _rope_field, _quantization_field, *_OTHER_KINDS))(rng)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON object in a file, which may not be there."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    change(content)
    path.write_text(json.dumps(content))


def _set(file: str, *keys: str, value: Any) -> Mutation:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            inner = content.get(key)
            content[key] = dict(inner) if isinstance(inner, dict) else {}
            content = content[key]
        content[keys[-1]] = value

    return f"{file}: {'.'.join(keys)} = {repr(value)[:50]}", lambda path: edit(path / file, change)


def _config_field(rng: random.Random) -> Mutation:
    return _set("config.json", rng.choice(FIELDS), value=rng.choice(VALUES))


def _rope_field(rng: random.Random) -> Mutation:
    kind = rng.choice(("default", "linear", "llama3"))
    field, value = rng.choice(ROPE), rng.choice(VALUES)
    rope = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, field: value}
    return _set("config.json", rng.choice(("rope_scaling", "rope_parameters")), value=rope)


def _quantization_field(rng: random.Random) -> Mutation:
    given: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    given[rng.choice(QUANTIZATION)] = rng.choice(VALUES)
    if rng.random() < 0.5:
        return _set("config.json", "quantization_config", value=given)
    return _set("hf_quant_config.json", "quantization", value=given)


def _other_file(rng: random.Random) -> Mutation:
    file = rng.choice(list(OTHER_FILES))
    return _set(file, rng.choice(OTHER_FILES[file]), value=rng.choice(VALUES))


def _bytes(rng: random.Random) -> Mutation:
    file, content = rng.choice(["config.json", "chat_template.jinja", *OTHER_FILES]), rng.choice(BYTES)
    return f"{file} is {content[:20]!r}", lambda path: (path / file).write_bytes(content)


def _header(rng: random.Random) -> Mutation:
    """One entry of the weights' header, or the length of the header itself, says what is not so."""
    seed, kind = rng.randrange(2**32), rng.choice(("length", "dtype", "shape", "offsets", "overlap", "cut", "value"))

    def apply(path: Path) -> None:
        local = random.Random(seed)
        file = path / "model.safetensors"
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        names = [name for name in header if name != "__metadata__"]
        entry, other = (header[name] for name in local.sample(names, 2))
        if kind == "length":
            length = local.choice((0, 1, size - 1, size + 1, len(data), 2**31, 2**63, 2**64 - 1))
            file.write_bytes(struct.pack("<Q", length) + data[8:])
            return
        if kind == "cut":
            file.write_bytes(data[: local.randrange(len(data))])
            return
        if kind == "dtype":
            entry["dtype"] = local.choice(
                ("F64", "F16", "BF16", "I8", "I32", "U64", "BOOL", "F8_E4M3", "F4", "X", "", 5)
            )
        elif kind == "shape":
            entry["shape"] = local.choice(([], [1], [-1], [2**63], [2**32, 2**32], [0, 4], other["shape"], "x", None))
        elif kind == "offsets":
            at, end = entry["data_offsets"]
            entry["data_offsets"] = local.choice(
                ([end, at], [at, end + 4], [at, 2**63], [-1, end], [at], None, [0.5, 1])
            )
        elif kind == "overlap":
            entry["data_offsets"] = other["data_offsets"]
        else:
            number = local.choice((NAN, INF, -INF, 3e38))
            at = entry["data_offsets"][0] + 4 * local.randrange(
                (entry["data_offsets"][1] - entry["data_offsets"][0]) // 4
            )
            body = body[:at] + struct.pack("<f", number) + body[at + 4 :]
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + body)

    return f"weights: {kind} ({seed})", apply


def _scales(rng: random.Random) -> Mutation:
    """A cache that was calibrated, with one scale that is none."""
    value, dtype, drop = rng.choice(SCALES), rng.choice(SCALE_DTYPES), rng.random() < 0.2
    algorithm, part = rng.choice(("FP8", "INT8")), rng.choice("kv")

    def apply(path: Path) -> None:
        edit(path / "hf_quant_config.json", lambda c: c.update(quantization={"kv_cache_quant_algo": algorithm}))
        weights = load_file(path / "model.safetensors")
        prefixes = [f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale" for layer in range(2) for kind in "kv"]
        weights |= {name: torch.tensor(0.01) for name in prefixes}
        name = f"model.layers.1.self_attn.{part}_proj.{part}_scale"
        weights[name] = torch.tensor(value).to(dtype)
        if drop:
            del weights[name]
        save_file(weights, path / "model.safetensors")

    return f"scales: {value} as {dtype}{' dropped' if drop else ''}", apply


_OTHER_KINDS = (_other_file, _bytes, _header, _scales)
