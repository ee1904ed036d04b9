"""The peers' models, made from this project's checkpoint: the same weights, a tokenizer their tools can convert."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvforge.checkpoint.copy_files import copy_files
from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.common.errors import KvforgeError, MissingToolError
from kvforge.common.staging import staging_directory
from model_defs.weights import weight_specs

OPENVINO_WEIGHTS = {"openvino": "fp16", "openvino-int8": "int8", "openvino-int4": "int4"}
"""Folder to optimum-cli's --weight-format; its fp16 keeps bf16 weights as they are."""

LLAMA_Q4, LLAMA_FILE = "llama-q4_0", "llama-file"
LLAMA_MODEL = "model.gguf"
LLAMA_CONVERTER = "convert_hf_to_gguf.py"
QUANTIZE = """
import ctypes, sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.pure = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
source, target = (path.encode() for path in sys.argv[1:])
sys.exit(llama_cpp.llama_model_quantize(source, target, ctypes.byref(params)))
"""
"""By llama-cpp-python; pure: the head is in 4 bits too, as ours is."""


def prepare_peer(checkpoint: Path, work: Path, peer_python: Path, name: str, llama_source: Path | None = None) -> Path:
    """Return the model directory of ``name`` ("transformers", ``LLAMA_Q4``, ``LLAMA_FILE`` or a key of
    ``OPENVINO_WEIGHTS``) under ``work``, made where it is not there yet. ``checkpoint`` is a directory, or a GGUF file,
    which llama.cpp runs as it is and the others dequantized.

    Raises:
        MissingToolError: a converter is not there: optimum-cli beside ``peer_python``, llama.cpp's in its sources.
        KvforgeError: a conversion fails, or ``LLAMA_FILE`` is asked for where there is no GGUF file.
    """
    if name == LLAMA_FILE:
        return _link_for_llama(checkpoint, work / f"peer-{name}")
    model = work / "peer-transformers"
    if not (model / "config.json").is_file():
        _write_hf_model(checkpoint, model)
    if name == "transformers":
        return model
    converted = work / f"peer-{name}"
    if name == LLAMA_Q4 and not (converted / LLAMA_MODEL).is_file():
        _convert_for_llama(model, converted, peer_python, llama_source)
    if name in OPENVINO_WEIGHTS and not (converted / "openvino_model.xml").is_file():
        _convert_for_openvino(model, converted, OPENVINO_WEIGHTS[name], peer_python)
    return converted


def _link_for_llama(file: Path, target: Path) -> Path:
    if not file.is_file():
        raise KvforgeError(f"{file} is no GGUF file, which llama.cpp could run as it is; leave that system out.")
    target.mkdir(parents=True, exist_ok=True)
    (target / LLAMA_MODEL).unlink(missing_ok=True)
    (target / LLAMA_MODEL).symlink_to(file.resolve())
    return target


def _write_hf_model(checkpoint: Path, model: Path) -> None:
    """In bf16, with the tokenizer of ``checkpoint``, or one of as many tokens where it has none."""
    if checkpoint.is_dir() and not (checkpoint / "tokenizer.json").is_file():
        _write_random_model(checkpoint, model)
    elif checkpoint.is_dir() and _is_in_bf16(config := json.loads((checkpoint / "config.json").read_text())):
        _link_weights(checkpoint, model)
        copy_files(checkpoint, model)
        _write_config(config, model)
    else:
        _write_in_bf16(checkpoint, model)


def _is_in_bf16(config: dict[str, Any]) -> bool:
    return "quantization_config" not in config and config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def _link_weights(checkpoint: Path, model: Path) -> None:
    """As they are, by the names of the family's own."""
    model.mkdir(parents=True, exist_ok=True)
    for source in checkpoint.glob("*.safetensors*"):
        link = model / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source.resolve())


def _write_in_bf16(checkpoint: Path, model: Path) -> None:
    opened = open_model(checkpoint)
    sources = (source for spec in weight_specs(read_model_config(opened)) for source in spec.sources)
    specs = [TensorSpec(source.name, tuple(source.shape), torch.bfloat16) for source in sources]
    with staging_directory(model, replace=True) as staging:
        write_safetensors(
            staging / "model.safetensors",
            specs,
            lambda spec: opened.read(spec.name, spec.shape, torch.bfloat16),
            {"format": "pt"},
        )
        _write_config(dict(opened.hf_config), staging)
        copy_files(opened.folder, staging)


def _write_config(config: dict[str, Any], model: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **config, "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _write_random_model(checkpoint: Path, model: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    config = json.loads((checkpoint / "config.json").read_text())
    _link_weights(checkpoint, model)
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocab |= {f"t{index}": index for index in range(len(vocab), config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback()])  # llama.cpp's converter wants a sequence
    tokenizer.save(str(model / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    _write_config(config, model)


def _convert_for_openvino(model: Path, target: Path, weight_format: str, peers_python: Path) -> None:
    tool = peers_python.parent / "optimum-cli"
    if not tool.is_file():
        raise MissingToolError(f"{tool} is not there; install optimum-intel and nncf beside {peers_python}.")
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    if weight_format == "int4":
        config = json.loads((model / "config.json").read_text())
        # NNCF's own of 128 input channels, or the largest below it that both widths hold.
        task += ["--group-size", str(math.gcd(128, config["hidden_size"], config["intermediate_size"]))]
    _run([tool, "export", "openvino", "-m", model, *task, unfinished], model)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def _convert_for_llama(model: Path, target: Path, llama_python: Path, source: Path | None) -> None:
    if source is None or not (source / LLAMA_CONVERTER).is_file():
        raise MissingToolError(
            f"no {LLAMA_CONVERTER} in {source}; give by --llama-source the directory of llama.cpp's sources."
        )
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    exact = unfinished / "bf16.gguf"
    _run([llama_python, source / LLAMA_CONVERTER, model, "--outtype", "bf16", "--outfile", exact], model)
    _run([llama_python, "-c", QUANTIZE, exact, unfinished / LLAMA_MODEL], model)
    exact.unlink()
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def _run(command: Sequence[str | Path], model: Path) -> None:
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise KvforgeError(f"{Path(command[0]).name} could not convert {model}; see above.")
