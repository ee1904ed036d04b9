"""Which kind of block each layer of a model is."""

from torch import nn

from model_defs.channel_delta import ChannelDelta
from model_defs.channel_delta_layers import ChannelDeltaBlock, ChannelDeltaUpdate
from model_defs.config import ModelConfig
from model_defs.gated_conv import GatedConv
from model_defs.gated_conv_layers import ConvUpdate, GatedConvBlock
from model_defs.kv_layout import NO_OWNER
from model_defs.latent_layers import LatentBlock
from model_defs.layers import Block
from model_defs.linear import LinearAttention
from model_defs.linear_layers import GatedBlock, LinearBlock, StateUpdate
from model_defs.mamba2 import Mamba2
from model_defs.mamba2_layers import Mamba2Block, Mamba2Update

STATEFUL: dict[type, type[Block]] = {
    ChannelDelta: ChannelDeltaBlock,
    GatedConv: GatedConvBlock,
    LinearAttention: LinearBlock,
    Mamba2: Mamba2Block,
}
UPDATES: dict[type, type[nn.Module]] = {
    ChannelDelta: ChannelDeltaUpdate,
    GatedConv: ConvUpdate,
    LinearAttention: StateUpdate,
    Mamba2: Mamba2Update,
}
"""What brings the states of a layer above a cut up to date, in the lower graph."""


def make_blocks(config: ModelConfig, layers: range) -> nn.ModuleDict:
    """Return the blocks of ``layers`` by their numbers."""
    plain = LatentBlock if config.latent else GatedBlock if config.attention_gate else Block
    kinds = {layer: STATEFUL[type(config.linear)] if config.is_linear(layer) else plain for layer in layers}
    blocks = {layer: kind(config, layer) for layer, kind in kinds.items()}
    for layer, block in blocks.items():
        if isinstance(block, LatentBlock) and (owner := config.owner_of_layer[layer]) not in (layer, NO_OWNER):
            block.owner.append(blocks[owner])
    return nn.ModuleDict({str(layer): block for layer, block in blocks.items()})


def make_updates(config: ModelConfig) -> dict[str, nn.Module]:
    """Return by their numbers what updates the states of the layers above the cut that keep one."""
    make = UPDATES[type(config.linear)]
    return {str(layer): nn.ModuleDict({"state": make(config.linear)}) for layer in config.upper_linear}
