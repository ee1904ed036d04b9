"""Checkpoints of the models in ``model_defs``: configuration and weights that belong together."""

from kvforge.checkpoint import Checkpoint
from kvforge.errors import CheckpointError
from model_defs import ModelConfig, ModelError, load_config
from model_defs.weights import weight_specs


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the model that config.json describes; raises CheckpointError where it is not supported."""
    try:
        return load_config(checkpoint.hf_config, checkpoint.generation_config)
    except ModelError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


def check_weights(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise CheckpointError now, not after minutes of work, if a tensor is missing or misshapen, or if there is a bias
    or a layer that the configuration does not ask for (without it the model would be another)."""
    sources = {source.name: source for spec in weight_specs(config) for source in spec.sources}
    for source in sources.values():
        checkpoint.check(source.name, source.shape)
    if any(name.startswith(f"model.layers.{config.num_layers}.") for name in checkpoint.file_of_tensor):
        raise CheckpointError(
            f"{checkpoint.path} has more layers than the {config.num_layers} of its config.json; config and weights do "
            "not belong together."
        )
    for name in sources:
        bias = name.removesuffix("weight") + "bias"
        if bias not in sources and bias in checkpoint.file_of_tensor:
            raise CheckpointError(
                f"{checkpoint.path} has {bias}, which config.json does not ask for; correct config.json "
                "(attention_bias, mlp_bias) or remove the tensor."
            )
