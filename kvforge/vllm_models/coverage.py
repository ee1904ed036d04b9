"""Which models with a cut the layers of this package compute. It needs no vLLM: a build says it before vLLM starts."""

from dataclasses import fields

from model_defs import ModelConfig

LACKING = {
    "experts": "experts",
    "latent": "latent attention",
    "linear": "linear attention",
    "attention_gate": "gates behind attention",
    "attention_sinks": "attention sinks",
    "branch_norms": "norms of branches",
    "pre_norms": "layers without norms before them",
    "qk_norm_whole": "norms of all heads together",
    "norm_offset": "offsets of norms",
    "activation": "gates other than SiLU",
    "local_rope": "rotations of windows alone",
    "layers_without_mixer": "layers that are an MLP alone",
    "layers_without_mlp": "layers without an MLP",
    "unrotated_layers": "layers without rotation",
    "attention_scale": "scales of scores",
    "query_growth": "scales of queries by their positions",
    "embedding_scale": "scales of embeddings",
    "residual_scale": "scales of what layers add",
    "logit_divisor": "scales of logits",
    "global_head_dim": "heads of two sizes",
    "layer_intermediate_sizes": "MLPs of two sizes",
    "v_norm": "norms of values",
    "layer_scalar": "scalars of layers",
    "logit_cap": "caps of logits",
    "per_layer_input": "inputs of layers",
}
"""Fields of ModelConfig that the layers pass over, and what a model has where such a field is not its default."""


def check_cut(config: ModelConfig, is_quantized: bool) -> None:
    """Raise ValueError where a model with a cut has what the layers do not compute, or quantized weights or caches."""
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    lacking = [what for name, what in LACKING.items() if getattr(config, name) != defaults[name]]
    if any(rope.partial < 1 or rope.interleaved for rope, _ in config.rotations):
        lacking.append("heads that rotate otherwise")
    if lacking:
        raise ValueError(
            f"SwiftKV checkpoints of {config.model_type} do not run on vLLM, where kvforge's layers have no "
            f"{', no '.join(lacking)}; build an engine of another target."
        )
    if is_quantized:
        raise ValueError(
            "SwiftKV checkpoints that are quantized do not run on vLLM; give the one that is not, or build an engine "
            "of another target."
        )
