"""Which kind of block each layer of a model is."""

from torch import nn

from model_defs.config import ModelConfig
from model_defs.gated_conv import GatedConv
from model_defs.gated_conv_layers import ConvUpdate, GatedConvBlock
from model_defs.latent_layers import LatentBlock
from model_defs.layers import Block
from model_defs.linear import LinearAttention
from model_defs.linear_layers import GatedBlock, LinearBlock, StateUpdate
from model_defs.mamba2 import Mamba2
from model_defs.mamba2_layers import Mamba2Block, Mamba2Update

STATEFUL: dict[type, type[Block]] = {GatedConv: GatedConvBlock, LinearAttention: LinearBlock, Mamba2: Mamba2Block}
UPDATES: dict[type, type[nn.Module]] = {GatedConv: ConvUpdate, LinearAttention: StateUpdate, Mamba2: Mamba2Update}
"""What brings the states of a layer above a cut up to date, in the lower graph."""


def make_blocks(config: ModelConfig, layers: range) -> nn.ModuleDict:
    """Return the blocks of ``layers`` by their numbers."""
    if config.latent is None:
        plain = GatedBlock if config.attention_gate else Block
        kinds = {layer: STATEFUL[type(config.linear)] if config.is_linear(layer) else plain for layer in layers}
        return nn.ModuleDict({str(layer): kind(config, layer) for layer, kind in kinds.items()})
    blocks = {str(layer): LatentBlock(config, layer) for layer in layers}
    for layer in layers:
        if (owner := config.owner_of_layer[layer]) != layer:
            blocks[str(layer)].owner.append(blocks[str(owner)])
    return nn.ModuleDict(blocks)


def make_updates(config: ModelConfig) -> dict[str, nn.Module]:
    """Return by their numbers what updates the states of the layers above the cut that keep one."""
    make = UPDATES[type(config.linear)]
    return {str(layer): nn.ModuleDict({"state": make(config.linear)}) for layer in config.upper_linear}
