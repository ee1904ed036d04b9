"""The LM head of a checkpoint where config.json and the tensors disagree about it. The tensors win, as they do in
transformers and vLLM."""

import warnings
from dataclasses import replace

import torch

from kvforge.checkpoint.reader import Checkpoint
from kvforge.common.errors import CheckpointError, CheckpointWarning

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
TIED = "tie_word_embeddings"
_ROWS = 1 << 14
"""Rows that are compared at a time."""


def settle_head(checkpoint: Checkpoint, is_tied: bool) -> Checkpoint:
    """Return the checkpoint with a configuration that its tensors agree with; ``is_tied`` is what it says so far.

    A stored head with values of its own is used, and the configuration becomes untied. A tied head that is stored in
    the place of the embeddings is read as those. The first warns with CheckpointWarning.

    Raises:
        CheckpointError: one of the two tensors cannot be read.
    """
    if not is_tied or not checkpoint.has(HEAD):
        return checkpoint
    if not checkpoint.has(EMBEDDINGS) and HEAD in checkpoint.file_of_tensor:
        return checkpoint.renamed(lambda name: EMBEDDINGS if name == HEAD else name)
    if not checkpoint.has(EMBEDDINGS) or are_equal(checkpoint, HEAD, checkpoint, EMBEDDINGS):
        return checkpoint
    warnings.warn(
        f"config.json of {checkpoint.path} says {TIED}, but {HEAD} is stored with values of its own; the stored head "
        f"is used. Set {TIED} to false to silence this.",
        CheckpointWarning,
        stacklevel=3,
    )
    return replace(checkpoint, hf_config={**checkpoint.hf_config, TIED: False})


def check_head(checkpoint: Checkpoint, is_tied: bool) -> None:
    """Raise CheckpointError where the model needs a head that is not stored; transformers would draw a random one."""
    if not is_tied and not checkpoint.has(HEAD):
        raise CheckpointError(
            f"{checkpoint.path} has no {HEAD}, and config.json does not say {TIED}; set {TIED} to true if the "
            "embeddings are the head, or download the weights again."
        )


def are_equal(checkpoint: Checkpoint, name: str, other: Checkpoint, other_name: str) -> bool:
    """Return whether two matrices, of one checkpoint or of two, have the same elements; one in a format of integers has
    elements of its own. Raises CheckpointError where one cannot be read."""
    if checkpoint.is_in_format(name) or other.is_in_format(other_name):
        return False
    shape = checkpoint.layout(name)[0]
    if len(shape) != 2 or other.layout(other_name)[0] != shape:
        return False
    return all(
        torch.equal(
            checkpoint.read(name, shape, torch.float32, rows), other.read(other_name, shape, torch.float32, rows)
        )
        for rows in ((first, min(first + _ROWS, shape[0])) for first in range(0, shape[0], _ROWS))
    )
