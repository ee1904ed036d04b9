"""The text model of a checkpoint that has parts for images or audio besides."""

from dataclasses import replace
from pathlib import Path

from kvforge.checkpoint.reader import Checkpoint
from kvforge.common.checkpoint_files import CONFIG
from kvforge.common.errors import CheckpointError
from kvforge.common.json_files import read_json
from model_defs import ModelError, text_part
from model_defs.text_part import text_tensor


def text_part_of(checkpoint: Checkpoint) -> Checkpoint:
    """Return the text part of a checkpoint as a checkpoint of its own, without the other parts' tensors; the checkpoint
    itself where there are none. Raises CheckpointError where its configuration has no text part, or two tensors are the
    same one."""
    try:
        hf_config = text_part(checkpoint.hf_config)
    except ModelError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    if hf_config is checkpoint.hf_config:
        return checkpoint
    files = {name: file for name, file in checkpoint.file_of_tensor.items() if text_tensor(name) is not None}
    part = replace(checkpoint, hf_config=hf_config, file_of_tensor=files, is_text_part=True)
    return part.renamed(lambda name: text_tensor(name) or name)


def what_is_left_out(path: Path) -> str | None:
    """Return a sentence for the user of a checkpoint of which only the text part is read; None for any other, and where
    there is no configuration. Raises CheckpointError where it cannot be read."""
    hf = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    try:
        is_whole = text_part(hf) is hf
    except ModelError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return None if is_whole else f"of {path} the text model is read; images and audio are not served"
