"""The peers' models, made from this project's checkpoint: the same weights, a tokenizer their tools can convert."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from kvforge.common.errors import KvforgeError, MissingToolError

OPENVINO_WEIGHTS = {"openvino": "fp16", "openvino-int8": "int8"}
"""Folder to optimum-cli's --weight-format; its fp16 keeps bf16 weights as they are."""


def prepare_peer(checkpoint: Path, work: Path, peer_python: Path, name: str) -> Path:
    """Return the model directory of ``name`` ("transformers" or a key of ``OPENVINO_WEIGHTS``) under ``work``, made
    where it is not there yet.

    Raises:
        MissingToolError: optimum-cli is not beside ``peer_python``.
        KvforgeError: a conversion fails.
    """
    model = work / "peer-transformers"
    if not (model / "config.json").is_file():
        _write_hf_model(checkpoint, model)
    if name not in OPENVINO_WEIGHTS:
        return model
    converted = work / f"peer-{name}"
    if not (converted / "openvino_model.xml").is_file():
        _convert(model, converted, OPENVINO_WEIGHTS[name], peer_python)
    return converted


def _write_hf_model(checkpoint: Path, model: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    model.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    weights = model / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to((checkpoint / "model.safetensors").resolve())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocab |= {f"t{index}": index for index in range(len(vocab), config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.save(str(model / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _convert(model: Path, target: Path, weight_format: str, peers_python: Path) -> None:
    tool = peers_python.parent / "optimum-cli"
    if not tool.is_file():
        raise MissingToolError(f"{tool} is not there; install optimum-intel and nncf beside {peers_python}.")
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    result = subprocess.run([tool, "export", "openvino", "-m", model, *task, unfinished], stdout=sys.stderr)
    if result.returncode:
        raise KvforgeError(f"optimum-cli could not convert {model}; see above.")
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
