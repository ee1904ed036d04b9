"""The text model of checkpoints that have parts for images or audio besides: its configuration, and its tensors."""

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.errors import ModelError
from model_defs.families import families
from model_defs.mtp import BESIDE

SHARED = ("bos_token_id", "dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")
"""Fields outside ``text_config`` that are the text model's too, and go before those within."""

_TENSOR = re.compile(rf"(?:model\.)?language_model\.(?:model\.)?(?P<inner>.+)|(?:lm_head\.|{re.escape(BESIDE)}).+")
"""transformers writes ``model.language_model.`` for some models and ``language_model.model.`` for others, and reads
both. Modules for multi-token prediction have no prefix."""


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the contents of a ``config.json`` say of the text model, as its family's own checkpoints have it; all
    of it where there is no other part. Raises ModelError where there is no text part of that family."""
    known = {family.model_type: family for family in families().values() if hf.get("model_type") in family.text_part_of}
    if not known:
        return hf
    part, only = hf.get("text_config"), next(iter(known)) if len(known) == 1 else None
    family = known.get(part.get("model_type", only)) if isinstance(part, Mapping) else None
    if family is None or not isinstance(part, Mapping):
        raise ModelError(
            f"text_config is {reprlib.repr(part)} in config.json; a {hf['model_type']} model needs an object with the "
            f"fields of {' or '.join(known)}."
        )
    shared = {name: hf[name] for name in SHARED if hf.get(name) is not None}
    return {**part, **shared, "model_type": family.model_type, "architectures": [family.architecture]}


def text_tensor(stored: str) -> str | None:
    """Return what the family's own checkpoints call a tensor of one with several parts; None for another part's."""
    found = _TENSOR.fullmatch(stored)
    if found is None:
        return None
    inner = found["inner"]
    return stored if inner is None else inner if inner.startswith("lm_head.") else f"model.{inner}"
