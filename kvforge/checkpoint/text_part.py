"""The text model of a checkpoint that has parts for images or audio besides."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvforge.checkpoint.opening import open_checkpoint
from kvforge.checkpoint.reader import Checkpoint
from kvforge.common.checkpoint_files import CONFIG
from kvforge.common.errors import CheckpointError
from kvforge.common.json_files import read_json
from model_defs import ModelError, family_of, text_part
from model_defs.config_keys import MTP_LAYERS, is_of_mtp
from model_defs.mtp import BESIDE
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


def without_mtp(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """Return the checkpoint without the layers behind its model's ``num_layers`` that predict more than the next token,
    as many as config.json says, and without modules beside its layers. Its configuration then speaks of none."""
    counts = (checkpoint.hf_config.get(key) for key in MTP_LAYERS)
    count = min(max((each for each in counts if isinstance(each, int)), default=0), 8)
    extra = tuple(f"model.layers.{num_layers + index}." for index in range(count))
    files = {name: at for name, at in checkpoint.file_of_tensor.items() if not name.startswith((BESIDE, *extra))}
    hf_config = {key: value for key, value in checkpoint.hf_config.items() if not is_of_mtp(key)}
    return replace(checkpoint, file_of_tensor=files, hf_config=hf_config)


def what_is_left_out(path: Path, takes_mtp: bool = False) -> str | None:
    """Return a sentence for the user of a checkpoint of which a part is not read: that of images and audio, or, unless
    an engine ``takes_mtp``, ``without_mtp``; None for any other, and where there is no configuration. Raises
    CheckpointError where it cannot be read."""
    hf = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    try:
        part = text_part(hf)
    except ModelError as error:
        raise CheckpointError(f"{path}: {error}") from None
    left_out = [] if part is hf else ["the text model is read; images and audio are not served"]
    if names := [] if takes_mtp else _modules(path, part):
        left_out.append(f"{', '.join(names)} for multi-token prediction is left out")
    return f"of {path} {', and '.join(left_out)}" if left_out else None


def _modules(path: Path, hf: Mapping[str, Any]) -> list[str]:
    """Return the names of what ``without_mtp`` leaves out of a checkpoint, whose text model has the configuration
    ``hf``."""
    num_layers, family = hf.get("num_hidden_layers"), family_of(hf)
    may_have_some = (family is not None and family.mtp is not None) or any(hf.get(key) for key in MTP_LAYERS)
    if not isinstance(num_layers, int) or not may_have_some:
        return []
    whole = text_part_of(open_checkpoint(path))
    left_out = whole.file_of_tensor.keys() - without_mtp(whole, num_layers).file_of_tensor.keys()
    return sorted({".".join(name.split(".")[: 1 if name.startswith(BESIDE) else 3]) for name in left_out})
