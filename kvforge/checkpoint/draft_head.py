"""Checkpoints of EAGLE-3 heads as they are published: by SafeAILab/EAGLE, SpecForge, and speculators for vLLM."""

import dataclasses
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvforge.checkpoint.head import EMBEDDINGS, are_equal
from kvforge.checkpoint.reader import Checkpoint, open_directory
from kvforge.common.errors import CheckpointError
from model_defs import ModelConfig, ModelError, load_config
from model_defs.draft_graph import draft_weight_specs
from model_defs.draft_head import NUM_STATES, DraftHead

TABLE, HEAD, TOKENS, IS_DRAFTED = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
"""The head's embedding, its LM head, what is added to each of its tokens to make it the target's, and which of the
target's tokens it has."""
IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER = re.compile(r"^midlayer\.")


def default_layers(config: ModelConfig) -> tuple[int, int, int]:
    """Return the layers whose incoming streams a head reads whose configuration names none."""
    return 2, config.num_layers // 2, config.num_layers - 3


def head_config(head: DraftHead) -> dict[str, Any]:
    """Return the config.json of a head, without where it reads: what other engines ask for as well."""
    model = head.model
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": head.width,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "max_position_embeddings": model.max_position,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": head.draft_vocab,
        "tie_word_embeddings": False,
    }


def open_draft_head(path: str | Path, target: Checkpoint, config: ModelConfig) -> tuple[Checkpoint, DraftHead]:
    """Open a head for the model ``config`` of the checkpoint ``target``; its tensors go by the names of
    ``model_defs.draft_graph``.

    Raises:
        CheckpointError: it cannot be read, is no such head or another model's, lacks a tensor or has one that this
            reader does not know.
    """
    checkpoint = open_directory(Path(path))
    checkpoint = checkpoint.renamed(lambda name: _LAYER.sub("layers.0.", name.removeprefix("model.")))
    if not checkpoint.has("fc.weight"):
        raise CheckpointError(f"{path} is no EAGLE-3 head: it has no tensor fc.weight.")
    if checkpoint.quantization is not None:
        raise CheckpointError(f"{path} is quantized ({checkpoint.quantization}); give the head as it was trained.")
    head = _head_of(Path(path), checkpoint.hf_config, config)
    if checkpoint.has(TABLE):
        checkpoint.check(TABLE, (head.model.vocab_size, head.width))
        head = dataclasses.replace(head, own_embedding=not are_equal(checkpoint, TABLE, target, EMBEDDINGS))
    elif head.width != config.hidden_size:
        raise CheckpointError(
            f"{path} has no {TABLE}, and its hidden_size {head.width} is not the {config.hidden_size} of the model, "
            "whose embedding it would take; give the head that belongs to this model."
        )
    specs = draft_weight_specs(config, head)
    for spec in specs:
        for source in spec.sources:
            checkpoint.check(source.name, source.shape)
    known = {source.name for spec in specs for source in spec.sources} | {TABLE, TOKENS, IS_DRAFTED}
    if unknown := sorted(checkpoint.file_of_tensor.keys() - known):
        raise CheckpointError(f"{path} has the tensor {unknown[0]}, which EAGLE-3 heads of one layer do not have.")
    tokens_of(checkpoint, head)
    return checkpoint, head


def tokens_of(checkpoint: Checkpoint, head: DraftHead) -> Tensor:
    """Return the target's token of each of the head's, int32 ``[draft_vocab]``; raises CheckpointError where they are
    not tokens of it."""
    own, size = torch.arange(head.draft_vocab), head.model.vocab_size
    if not checkpoint.has(TOKENS):
        if head.draft_vocab != size:
            raise CheckpointError(
                f"{checkpoint.path} has {head.draft_vocab} tokens of {size} and no {TOKENS} that says which; download "
                "it again."
            )
        return own.int()
    added = checkpoint.read_raw(TOKENS, finite=False)
    if added.dtype not in (torch.int32, torch.int64) or added.shape != own.shape:
        raise CheckpointError(
            f"{TOKENS} in {checkpoint.path} is {added.dtype} {list(added.shape)}; it must be one whole number for each "
            f"of draft_vocab_size {head.draft_vocab} tokens."
        )
    tokens = own + added
    if int(tokens.min()) < 0 or int(tokens.max()) >= size:
        raise CheckpointError(f"{TOKENS} in {checkpoint.path} leads to tokens outside the {size} of the model.")
    return tokens.int()


def _head_of(path: Path, said: Mapping[str, Any], config: ModelConfig) -> DraftHead:
    """Return the head that a config.json describes; raises CheckpointError for one of another model."""
    hf = {**said, **said.get("transformer_layer_config", {})}  # speculators' form
    before = bool(hf.get("norm_before_residual", "speculators_model_type" in hf))
    hf = {"num_hidden_layers": 1, **hf, "model_type": "llama"}
    own = {name: hf.get(name) for name in ("num_hidden_layers", "target_hidden_size", "logit_scale", "logits_scaling")}
    hf |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "vocab_size": config.vocab_size}
    named = said.get("vocab_size", config.vocab_size)
    wanted = (
        ("num_hidden_layers", own["num_hidden_layers"], 1, "a head of one layer is supported"),
        (
            "target_hidden_size",
            own["target_hidden_size"] or config.hidden_size,
            config.hidden_size,
            "that of the model",
        ),
        ("vocab_size", named, config.vocab_size, "that of the model"),
        ("logit_scale", own["logit_scale"] or 1.0, 1.0, "the only one that is supported"),
    )
    for name, value, good, what in wanted:
        if value != good:
            raise CheckpointError(f"{path}: {name} is {reprlib.repr(value)} in config.json, and {good} is {what}.")
    vocab = hf.get("draft_vocab_size") or config.vocab_size
    if type(vocab) is not int or not 1 <= vocab <= config.vocab_size:
        raise CheckpointError(
            f"{path}: draft_vocab_size is {reprlib.repr(vocab)} in config.json, and the model has {config.vocab_size} "
            "tokens."
        )
    try:
        model = load_config(hf)
    except ModelError as error:
        raise CheckpointError(f"{path}: {error}") from None
    model = dataclasses.replace(
        model, qkv_bias=False, output_bias=False, mlp_bias=False, max_position=config.max_position
    )
    return DraftHead(model, _layers(path, hf, config), vocab, before)


def _layers(path: Path, hf: Mapping[str, Any], config: ModelConfig) -> tuple[int, int, int]:
    """Return the layers whose incoming streams are read. In ``eagle_config``, which is SGLang's, layers are named whose
    outputs these are."""
    nested = hf.get("eagle_config")
    ids, after = hf.get(IDS), 0
    if not ids and isinstance(nested, dict):
        ids = nested.get(IDS)
        after = 1 if ids else 0
    layers = ids or default_layers(config)
    if isinstance(layers, (list, tuple)) and all(type(layer) is int for layer in layers):
        found = tuple(layer + after for layer in layers)
        if len(found) == NUM_STATES and min(found) >= 0 and max(found) <= config.num_layers:
            return found
    raise CheckpointError(
        f"{path}: {IDS} is {reprlib.repr(layers)}; it must be {NUM_STATES} of the {config.num_layers} layers of the "
        "model. Name them in the head's config.json."
    )
