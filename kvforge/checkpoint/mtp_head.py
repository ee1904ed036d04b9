"""Modules for multi-token prediction that checkpoints carry beside their models, opened as draft heads."""

import reprlib
from dataclasses import replace
from pathlib import Path

from kvforge.checkpoint.head import EMBEDDINGS, HEAD, are_equal
from kvforge.checkpoint.model import check_biases, open_with_mtp, read_model_config
from kvforge.checkpoint.reader import Checkpoint
from kvforge.common.checkpoint_files import CONFIG
from kvforge.common.errors import CheckpointError
from kvforge.common.json_files import read_json
from model_defs import ModelConfig, ModelError, families, family_of, text_part
from model_defs.config_keys import MTP_LAYERS
from model_defs.draft_head import DraftHead
from model_defs.mtp import MtpLayout, mtp_head
from model_defs.mtp_graph import mtp_weight_specs

MTP = "mtp"
"""What stands for the checkpoint's own module where the path of a head is asked for."""
_INSTEAD = "leave --draft-head out, or give another head for the model"
_PUBLISHED = "give the published checkpoint as --draft-head, or leave that out"


def carrier_of(head: str | Path, checkpoint: Checkpoint) -> Path | None:
    """Return the checkpoint whose module ``head`` stands for, the model's own or one of a family that has modules; None
    for another kind of head. Raises CheckpointError for a damaged config.json."""
    if str(head) == MTP:
        return checkpoint.path
    file = Path(head) / CONFIG
    try:
        family = family_of(text_part(read_json(file))) if file.is_file() else None
    except ModelError as error:
        raise CheckpointError(f"{head}: {error}") from None
    return Path(head) if family is not None and family.mtp is not None else None


def open_mtp_head(path: Path, target: Checkpoint, config: ModelConfig) -> tuple[Checkpoint, DraftHead]:
    """Open the module that the checkpoint at ``path`` carries, for the model ``config`` of the checkpoint ``target``.

    Raises:
        CheckpointError: it has no module or several, is another model's, lacks a tensor or has one of another shape.
    """
    layout = families()[config.model_type].mtp
    if layout is None:
        raise CheckpointError(f"{config.model_type} models carry no module for multi-token prediction; {_INSTEAD}.")
    whole = open_with_mtp(path)
    its = read_model_config(whole)
    if (its.model_type, its.num_layers) != (config.model_type, config.num_layers):
        raise CheckpointError(
            f"{path} is of type {its.model_type} with {its.num_layers} layers, and its module is for no "
            f"{config.model_type} with {config.num_layers}; {_INSTEAD}."
        )
    _check_count(whole, layout)
    embedding, lm_head = (layout.stored_name(config, name) for name in (EMBEDDINGS, HEAD))
    checkpoint = _with_weight_of(target, "model.norm.weight", whole, "model.norm.weight")
    for name, own in ((embedding, EMBEDDINGS), (lm_head, EMBEDDINGS if config.tie_embeddings else HEAD)):
        checkpoint = checkpoint if checkpoint.has(name) else _with_weight_of(target, own, checkpoint, name)
    head = mtp_head(config)
    sources = {source.name: source for spec in mtp_weight_specs(config, head) for source in spec.sources}
    for source in sources.values():
        if not checkpoint.has(source.name):
            raise CheckpointError(
                f"{path} has no {source.name}, which its module for multi-token prediction needs; {_PUBLISHED}."
            )
        checkpoint.check(source.name, source.shape)
    check_biases(checkpoint, sources)
    return checkpoint, replace(
        head,
        own_embedding=not are_equal(checkpoint, embedding, target, EMBEDDINGS),
        own_lm_head=config.tie_embeddings or not are_equal(checkpoint, lm_head, target, HEAD),
    )


def _check_count(checkpoint: Checkpoint, layout: MtpLayout) -> None:
    """Raise CheckpointError unless there is one module."""
    count, said = layout.count(checkpoint.file_of_tensor), "by its tensors"
    if layout.is_behind_layers:
        hf = checkpoint.hf_config
        key = next((key for key in MTP_LAYERS if hf.get(key) is not None), MTP_LAYERS[0])
        count, said = hf.get(key) or 0, f"by {key} of its config.json"
    if type(count) is not int or count != 1:
        raise CheckpointError(
            f"{checkpoint.path} has {reprlib.repr(count)} modules for multi-token prediction {said}, and engines draft "
            f"with checkpoints that have 1; {_INSTEAD if count else _PUBLISHED}."
        )


def _with_weight_of(source: Checkpoint, name: str, checkpoint: Checkpoint, new: str) -> Checkpoint:
    """The checkpoint with all that ``source`` stores of the weight ``name``, under the name ``new``."""
    module, own = (each.removesuffix("weight") for each in (name, new))
    more = {f"{own}{each.removeprefix(module)}": each for each in source.file_of_tensor if each.startswith(module)}
    names, pieces = source.stored_names, source.pieces
    return replace(
        checkpoint,
        file_of_tensor={**checkpoint.file_of_tensor, **{a: source.file_of_tensor[b] for a, b in more.items()}},
        stored_names={**checkpoint.stored_names, **{a: names.get(b, b) for a, b in more.items()}},
        pieces={**checkpoint.pieces, **{a: pieces[b] for a, b in more.items() if b in pieces}},
    )
