"""The files of a checkpoint that are copied to one made from it."""

import shutil
from pathlib import Path

from kvforge.common.checkpoint_files import copy_tokenizer_files

_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


def copy_files(source: Path, directory: Path) -> None:
    """Copy what is neither weights nor config.json: tokenizer, generation settings, templates, licence."""
    for file in sorted(source.iterdir()):
        skip = file.name == "config.json" or file.name.startswith(".") or file.name.endswith(_WEIGHT_FILES)
        if file.is_file() and not skip:
            shutil.copyfile(file, directory / file.name)
    copy_tokenizer_files(source, directory)
