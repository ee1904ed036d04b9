"""Checkpoints of the models in ``model_defs``: configuration and weights that belong together."""

import re
from collections.abc import Collection
from pathlib import Path

from kvforge.checkpoint import Checkpoint, open_checkpoint
from kvforge.checkpoint.fused import split_fused
from kvforge.checkpoint.head import check_head, settle_head
from kvforge.checkpoint.stacked import is_mxfp4, unstack_experts
from kvforge.checkpoint.text_part import text_part_of, without_mtp
from kvforge.common.checkpoint_files import CONFIG
from kvforge.common.errors import CheckpointError
from kvforge.common.json_files import read_json
from model_defs import Family, ModelConfig, ModelError, family_of, load_config, supported_family
from model_defs.weights import weight_specs

_IS_NUMBER = re.compile("[0-9]{1,9}")


def open_model(path: str | Path) -> Checkpoint:
    """Open a checkpoint as ``open_with_mtp`` does, without layers and modules that predict more than the next token."""
    checkpoint = open_with_mtp(path)
    if family_of(checkpoint.hf_config) is None:
        return checkpoint
    return without_mtp(checkpoint, read_model_config(checkpoint).num_layers)


def open_with_mtp(path: str | Path) -> Checkpoint:
    """Open a checkpoint whose tensors go by the names of ``model_defs.weights``, whatever its family calls them. Of one
    with parts for images or audio it is the text part, as if that were a checkpoint by itself.

    Raises CheckpointError for a family that is not supported, as ``open_checkpoint`` does, and where two tensors would
    go by one name. Where config.json and the tensors disagree about the LM head, the tensors win (``settle_head``)."""
    _check_family(Path(path))
    checkpoint = text_part_of(open_checkpoint(path))
    family = family_of(checkpoint.hf_config)
    if family is None:
        return checkpoint
    if is_mxfp4(checkpoint) and (not family.stacked or family.stacked_by_outputs):
        raise CheckpointError(
            f"{path} has weights in MXFP4, which {family.model_type} models are not read with; use the unquantized "
            "checkpoint."
        )
    checkpoint = checkpoint.renamed(family.weight_name)
    checkpoint = _split(checkpoint, family) if family.fused else checkpoint
    config = read_model_config(checkpoint)
    if family.stacked and config.experts is not None:
        count, by_outputs = config.experts.num_experts, family.stacked_by_outputs
        checkpoint = unstack_experts(checkpoint, family.stacked, count, by_outputs)
    return settle_head(checkpoint, config.tie_embeddings)


def _split(checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """The checkpoint with fused tensors as the rows of each module, whose number is the same in all layers."""
    plain = read_model_config(checkpoint).first_layers(1)
    first = {source.name: source.shape[0] for spec in weight_specs(plain) for source in spec.sources}
    rows = {end: [(part, first[f"model.layers.0.{part}.weight"]) for part in parts] for end, parts in family.fused}
    return split_fused(checkpoint, rows)


def _check_family(path: Path) -> None:
    """Raise CheckpointError for another family's configuration, whatever else is wrong with the checkpoint."""
    file = path / CONFIG
    if file.is_file():
        try:
            supported_family(read_json(file))
        except ModelError as error:
            raise CheckpointError(f"{path}: {error}") from None


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the model that config.json describes; raises CheckpointError where it is not supported."""
    try:
        return load_config(checkpoint.hf_config, checkpoint.generation_config)
    except ModelError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


def check_is_rewired(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a family that has no SwiftKV form."""
    family = family_of(checkpoint.hf_config)
    if family is not None and not (family.is_rewired and read_model_config(checkpoint).may_be_cut):
        raise CheckpointError(
            f"{checkpoint.path} is a model of type {family.model_type}, which kvforge does not rewire, distil or "
            "calibrate; build an engine of it as it is."
        )


def check_has_no_states(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a model with layers that keep a state, which is distilled and no more."""
    kind = read_model_config(checkpoint).linear
    if kind is not None:
        raise CheckpointError(
            f"{checkpoint.path} has {kind.title}, for which kvforge calibrates no codes, predictors, scorers or draft "
            "heads; build an engine of it as it is."
        )


def check_is_not_blind(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a model with a blind cut."""
    if read_model_config(checkpoint).is_blind:
        raise CheckpointError(
            f"{checkpoint.path} has a blind cut, which kvforge does not rewire, predict or quantize; give the plain "
            "checkpoint that it was made from."
        )


def check_weights(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise CheckpointError now, not after minutes of work, if a tensor is missing or misshapen, if no weight is stored
    as config.json says, or if there is a bias or a layer that the configuration does not ask for (without it the model
    would be another)."""
    _check_layers(checkpoint, config)
    check_head(checkpoint, config.tie_embeddings)
    _check_format(checkpoint, config)
    sources = {source.name: source for spec in weight_specs(config) for source in spec.sources}
    for source in sources.values():
        checkpoint.check(source.name, source.shape)
    check_biases(checkpoint, sources)


def check_biases(checkpoint: Checkpoint, sources: Collection[str]) -> None:
    """Raise CheckpointError where weights of these names have biases that are not among them."""
    for name in sources:
        bias = name.removesuffix("weight") + "bias"
        is_unasked = bias not in sources and bias in checkpoint.file_of_tensor
        if is_unasked and checkpoint.read_raw(bias).count_nonzero():  # AutoGPTQ writes biases of zeros
            raise CheckpointError(
                f"{checkpoint.path} has {bias}, which config.json does not ask for; correct config.json "
                "(attention_bias, mlp_bias) or remove the tensor."
            )


def _check_format(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise CheckpointError where config.json speaks of another library's weights, and not one is stored so."""
    stored = checkpoint.quantization.weight_format if checkpoint.quantization is not None else None
    if stored is None or not stored.has_weights:
        return
    names = (checkpoint.whole(source.name) for spec in weight_specs(config) for source in spec.sources)
    if not any(name.endswith(".weight") and stored.holds(checkpoint, name) for name in names):
        raise CheckpointError(
            f"{checkpoint.path} has quantization_config of {stored.name} in config.json and no weight that is stored "
            "so; remove quantization_config if the weights are not quantized, or download them again."
        )


def int4_dtype(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """Return which of the int4 weight dtypes keeps the weights that the checkpoint has in 4 bits as they are: with
    zero points, with scales, or, where those of all are whole steps, or there are no such weights, in steps."""
    names = sorted({source.name for spec in weight_specs(config) for source in spec.sources})
    if any(checkpoint.has_zero_points(name) for name in names):
        return "int4_zeros"
    has_scales = any(checkpoint.has_codes(name) and not checkpoint.has_steps(name) for name in names)
    return "int4_scales" if has_scales else "int4"


def _check_layers(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise CheckpointError unless the tensors are those of as many layers as the configuration says."""
    numbers = (name.split(".", 3)[2] for name in checkpoint.file_of_tensor if name.startswith("model.layers."))
    last = max((int(number) for number in numbers if _IS_NUMBER.fullmatch(number)), default=-1)
    if last + 1 != config.num_layers:
        raise CheckpointError(
            f"{checkpoint.path} has {'more' if last >= config.num_layers else 'fewer'} layers than the "
            f"{config.num_layers} of its config.json (num_hidden_layers); config and weights do not belong together."
        )
