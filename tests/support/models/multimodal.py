"""Random checkpoints of models with parts for images and audio besides their text, made by transformers."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.models.checkpoints import SMALL, randomize, write_byte_tokenizer

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"image_token_id": 320, "boi_token_id": 321, "eoi_token_id": 322}
AUDIO = {"audio_token_id": 323, "boa_token_id": 324, "eoa_token_id": 325, "video_token_id": 326}
"""Beyond the vocabulary: no prompt has them, which transformers would take for images without pixels."""

MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {**TINY, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4, **IMAGES},
    "gemma4": {
        "vision_config": {
            **TINY,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": (8, 8),
            "output_proj_dims": 32,
        },
        **IMAGES,
        **AUDIO,
    },
    **{
        name: {
            "vision_config": {
                **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
                **{"num_position_embeddings": 16, "patch_size": 4},
            },
            **{"image_token_id": 320, "video_token_id": 321, "vision_start_token_id": 322, "vision_end_token_id": 323},
        }
        for name in ("qwen3_5", "qwen3_5_moe")
    },
    "mistral3": {
        "vision_config": {"model_type": "pixtral", **TINY, "head_dim": 16, "image_size": 28, "patch_size": 14},
        "image_token_index": 320,
    },
}
"""What transformers' configurations ask for besides the text's, by ``model_type``."""

PREFIXES = ("model.language_model.", "language_model.model.")
"""What checkpoints have before the names of the text model's tensors, the heads excepted."""


def make_multimodal(path: Path, model_type: str, prefix: str = PREFIXES[0], /, **text: Any) -> Path:
    """Write a random checkpoint with the ``text_config`` of ``SMALL`` and ``text``, and the text's tensors after
    ``prefix``, whichever transformers takes for the model."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    others = copy.deepcopy(MODELS[model_type])
    tied = text.get("tie_word_embeddings", True)
    config = config_class(text_config={**SMALL, **copy.deepcopy(text)}, tie_word_embeddings=tied, **others)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    randomize(model)
    model.save_pretrained(path)
    write_byte_tokenizer(path, SMALL["vocab_size"])
    tensors = load_file(path / "model.safetensors")
    save_file({renamed(name, prefix): x for name, x in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def renamed(name: str, prefix: str) -> str:
    """The name of a tensor in a checkpoint with that prefix; the published ones with the second one have the heads
    beside the model, and other parts without ``model.``."""
    is_inner = prefix == PREFIXES[1]
    inner = name.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1])
    if inner != name:
        return prefix + inner
    if name.endswith("lm_head.weight"):
        return "language_model.lm_head.weight" if is_inner else "lm_head.weight"
    outer = name.removeprefix("model.")
    return outer if is_inner else f"model.{outer}"
