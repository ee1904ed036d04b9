"""The names that llama.cpp gives to tensors, and those of ``model_defs.weights``."""

import re
from collections.abc import Iterator

from kvforge.checkpoint.gguf.config import FACTORS, FREQUENCIES
from kvforge.checkpoint.gguf.derived_tensors import GgufPiece
from kvforge.checkpoint.gguf.header import Header, StoredTensor
from kvforge.common.errors import CheckpointError
from model_defs import Family, ModelConfig
from model_defs.weights import weight_specs

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_SINKS = "attn_sinks"
_QUERIES, _KEYS = "self_attn.q_proj", "self_attn.k_proj"
_NORM = re.compile(r"norm\.weight$")
_LAYER = re.compile(r"blk\.(?P<layer>\d{1,9})\.(?P<module>\w+)\.(?P<kind>weight|bias)")
_MODULE = re.compile(r"(?P<module>\w+)\.(?P<kind>weight|bias)")


def pieces_of(header: Header, family: Family, config: ModelConfig) -> dict[str, GgufPiece]:
    """Return the tensors of a file under the names of ``model_defs.weights`` and of the family's ``fused``.

    Raises:
        CheckpointError: a tensor has no place in the family's models.
    """
    known = {source.name for spec in weight_specs(config) for source in spec.sources}
    layers = [f"model.layers.{layer}." for layer in range(config.num_layers)]
    known |= {f"{layer}{end}.weight" for layer in layers for end, _ in family.fused}
    known |= {name.removesuffix("weight") + "bias" for name in known}  # check_weights says which are not asked for
    found: dict[str, GgufPiece] = {}
    for tensor in header.tensors:
        if tensor.name in (FREQUENCIES, *FACTORS.values()):
            continue
        pieces = dict(_pieces(tensor, family, config))
        if not pieces or not known.issuperset(pieces):
            raise CheckpointError(
                f"{header.path} has tensor {tensor.name}, which has no place in a {family.model_type} model of "
                f"{config.num_layers} layers; it is not supported."
            )
        found |= pieces
    return found


def _pieces(tensor: StoredTensor, family: Family, config: ModelConfig) -> Iterator[tuple[str, GgufPiece]]:
    """A stored tensor's pieces by their names: one, or one for each expert."""
    if (outside := _MODULE.fullmatch(tensor.name)) is not None and outside["module"] in _OUTSIDE:
        name = f"{_OUTSIDE[outside['module']]}.{outside['kind']}"
        yield name, GgufPiece(tensor, offset=_offset(name, config))
    place = _LAYER.fullmatch(tensor.name)
    if place is None or family.gguf is None:
        return
    prefix, module, kind = f"model.layers.{int(place['layer'])}.", place["module"], place["kind"]
    if module == _SINKS:
        yield f"{prefix}self_attn.sinks", GgufPiece(tensor)
    elif module in _EXPERTS and config.experts is not None:
        if tensor.shape[0] != config.experts.num_experts:
            return
        for expert in range(config.experts.num_experts):
            yield f"{prefix}mlp.experts.{expert}.{_EXPERTS[module]}.{kind}", GgufPiece(tensor, index=expert)
    else:
        norms = {
            "ffn_norm": config.layer_norms.before_mlp,
            "post_attention_norm": config.layer_norms.of_attention,
            "post_ffw_norm": config.layer_norms.of_mlp,
        }
        ours = {**_IN_LAYER, **norms, **family.gguf.names}.get(module)
        if ours is None:
            return
        name = f"{prefix}{ours}.{kind}"
        paired = {_QUERIES: config.num_heads, _KEYS: config.num_kv_heads}.get(ours, 0) if family.gguf.is_paired else 0
        yield name, GgufPiece(tensor, paired_heads=paired, offset=_offset(name, config))


def _offset(name: str, config: ModelConfig) -> float:
    """Gains of norms hold what ``norm_offset`` adds to those of Hugging Face's files."""
    return -config.norm_offset if _NORM.search(name) else 0.0
