"""What a model family says of itself."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model_defs.config import ModelConfig
from model_defs.gguf_form import GgufForm
from model_defs.mtp import MtpLayout


@dataclass(frozen=True)
class Family:
    """The models of one Hugging Face ``model_type``.

    ``architecture`` is the family's class in transformers, as ``config.json`` names it. ``from_hf`` makes a ModelConfig
    of the contents of a ``config.json`` and raises ModelError. ``traits`` are the fields of ModelConfig that have one
    value in all models of the family. ``weight_names`` are regular expressions and what takes the place of their
    matches: applied in order, they turn the names of the family's tensors into those of ``model_defs.weights``, and
    leave the latter as they are. ``fused`` are modules that the family's checkpoints may store as one, such as
    ``self_attn.qkv_proj``, each with the modules of ``model_defs.weights`` whose rows follow each other in it. Those
    that are not ``is_rewired`` have no SwiftKV form, and no model to calibrate and train. ``text_part_of`` are the
    ``model_type`` of checkpoints with parts for images or audio besides, whose text part is a model of the family.
    ``reads`` are the keys of ``config.json`` that ``from_hf`` reads besides those of ``model_defs.config_keys``, and
    ``fixed`` keys that the family's models in transformers obey and here do not, with the values that change
    nothing; ``ignored`` are those of ``model_defs.config_keys.USED`` that change nothing in this family, and why.
    ``stacked`` are tensors of all experts of a layer, ``[experts, inputs, outputs]``, each with the projections of
    ``model_defs.weights`` whose outputs take turns in it: with ``_bias`` behind the name their biases, with
    ``_blocks`` and ``_scales`` the weights in MXFP4. Where they are ``stacked_by_outputs``, they are ``[experts,
    outputs, inputs]``, the outputs of a projection behind those of the one before. ``gguf`` says how GGUF files hold
    the family's models, where they are read, and ``mtp`` what checkpoints call the parts of a module for multi-token
    prediction, where one may be in them."""

    model_type: str
    architecture: str
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    traits: Mapping[str, bool] = field(default_factory=dict)
    weight_names: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    is_rewired: bool = True
    text_part_of: tuple[str, ...] = ()
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stacked_by_outputs: bool = False
    reads: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    gguf: GgufForm | None = None
    mtp: MtpLayout | None = None

    @property
    def swiftkv_architecture(self) -> str:
        """What ``architecture`` becomes with a SwiftKV cut."""
        return f"{self.architecture.removesuffix('ForCausalLM')}SwiftKVForCausalLM"

    def weight_name(self, stored: str) -> str:
        """Return the name in ``model_defs.weights`` of the tensor that a checkpoint calls ``stored``."""
        for pattern, replacement in self.weight_names:
            stored = re.sub(pattern, replacement, stored)
        return stored
