"""Names of the files that a checkpoint has."""

import re
import shutil
from pathlib import Path

CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
GGUF_SUFFIX, GGUF_MAGIC = ".gguf", b"GGUF"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
ADDITIONAL_TEMPLATES = "additional_chat_templates"
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    CHAT_TEMPLATE,
    PROCESSOR_TEMPLATE,
    f"{ADDITIONAL_TEMPLATES}/*.jinja",
    "generation_config.json",
)
"""Patterns of the files beside the weights that an engine keeps."""


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a GGUF file, or by its name would be one."""
    if path.suffix.lower() == GGUF_SUFFIX:
        return not path.is_dir()
    return begins_with(path, GGUF_MAGIC)


def begins_with(path: Path, start: bytes) -> bool:
    """Whether ``path`` is a file that can be read and begins with ``start``."""
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


def gguf_name(path: Path) -> str:
    """Return what to call the model in a GGUF file: the file's name, without its ending and the number of its part."""
    return _PART.sub("", path.stem)


def tokenizer_files(folder: Path) -> list[str]:
    """Return those of ``TOKENIZER_FILES`` that are in a checkpoint's folder, relative to it."""
    found = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    return sorted(file.relative_to(folder).as_posix() for file in found)


def copy_tokenizer_files(source: Path, directory: Path) -> None:
    """Copy ``tokenizer_files`` of one folder into another."""
    for name in tokenizer_files(source):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, directory / name)
