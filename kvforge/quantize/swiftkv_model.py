"""SwiftKV models as ModelOpt takes them: it quantizes ``nn.Linear`` layers and asks for ``config``, ``device`` and
``save_pretrained``."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvforge.checkpoint import Checkpoint
from kvforge.swiftkv import SwiftKVForCausalLM, load_weights
from model_defs import ModelConfig


class CalibratedModel(SwiftKVForCausalLM):
    """A SwiftKV model that ModelOpt quantizes and exports as it does transformers' models."""

    def __init__(self, config: ModelConfig, hf_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config)
        self.hf_config = dict(hf_config)
        self.config = SimpleNamespace(torch_dtype=dtype, is_encoder_decoder=False, use_cache=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    def save_pretrained(
        self, directory: str | Path, state_dict: Mapping[str, Tensor], max_shard_size: int | str = "10GB", **_: Any
    ) -> None:
        """Write config.json and the weights; scales of the cache are named after SwiftKV's projections."""
        from huggingface_hub import save_torch_state_dict

        (Path(directory) / "config.json").write_text(json.dumps(self.hf_config, indent=2) + "\n", encoding="utf-8")
        weights = {self._name_of_scale(name): tensor for name, tensor in state_dict.items()}
        save_torch_state_dict(weights, directory, max_shard_size=max_shard_size)

    def _name_of_scale(self, name: str) -> str:
        if not name.endswith((".k_scale", ".v_scale")):
            return name
        attention, projection, scale = name.rsplit(".", 2)
        suffix = self.get_submodule(attention).suffix
        return f"{attention}.{projection}{suffix}.{scale}"


def load_swiftkv(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> CalibratedModel:
    """Return the model of a checkpoint in ``dtype``; the teacher's unused projections are left out.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    with torch.device("meta"):
        model = CalibratedModel(config, checkpoint.hf_config, dtype)
    load_weights(model, checkpoint, dtype)
    model.eval()
    return model
