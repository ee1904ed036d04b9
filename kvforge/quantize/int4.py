"""A checkpoint's weights in 4 bits, rounded by what its layers see of a calibration text, layer after layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kvforge.swiftkv import SwiftKVForCausalLM
from kvforge.swiftkv.attention import KV
from kvforge.swiftkv.token_layout import Layout, make_layout
from model_defs import ModelConfig
from plugins.packed_linear.by_inputs import round_by_inputs
from plugins.packed_linear.int4 import Codes
from plugins.packed_linear.int4_steps import half_scales_of_steps, round_in_steps


@torch.inference_mode()
def quantize_layers(
    model: SwiftKVForCausalLM, samples: list[list[int]], progress: Callable[[int, int], object]
) -> dict[str, Codes]:
    """Round every linear layer of the decoder, and put what is left of each weight in its place; returns the codes by
    the names of the weights. The head stays as it is.

    A layer is rounded by its inputs as the rounded layers before it make them. ``progress`` is called with the layers
    that are done and all of them.
    """
    config, decoder, codes = model.sizes, model.model, {}
    texts = [_Text(make_layout(config, len(ids)), decoder.embed(torch.tensor([ids]))) for ids in samples]
    for index, layer in enumerate(decoder.layers):
        progress(index, config.num_layers)
        for text in texts:
            if index == config.cut and config.is_swiftkv:
                text.single_input = decoder.norm_swiftkv(text.hidden)
        with _moments(layer) as moments:
            for text in texts:
                text.run(layer, index, config)
        for name, linear in _linears(layer):
            if (seen := moments.get(name)) is None:  # no token of the calibration has come to an expert
                rounded = round_in_steps(linear.weight, half_scales_of_steps(linear.weight)).as_codes()
            else:
                rounded = round_by_inputs(linear.weight, seen).as_codes()
            codes[f"model.layers.{index}.{name}.weight"] = rounded
            linear.weight.copy_(rounded.dequantize())
        for text in texts:
            text.hidden = text.run(layer, index, config)
    progress(config.num_layers, config.num_layers)
    return codes


@dataclass
class _Text:
    """A text on its way through the layers: the residual stream ``[1, T, hidden]``; above a cut also what K and V come
    from, and those of each owner."""

    layout: Layout
    hidden: Tensor
    single_input: Tensor | None = None
    shared: dict[int, KV] = field(default_factory=dict)

    def run(self, layer: nn.Module, index: int, config: ModelConfig) -> Tensor:
        """Return what ``layer`` makes of the residual stream."""
        kv = None
        if self.single_input is not None:
            owner = config.owner_of_layer[index]
            if owner == index:
                self.shared[owner] = layer.self_attn.key_value(self.single_input, self.layout)
            kv = self.shared[owner]
        output: Tensor = layer(self.hidden, kv, self.layout)
        return output


def _linears(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear)]


@contextmanager
def _moments(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The sum of x xᵀ over the inputs of each linear layer that runs in the body, float32 ``[K, K]``."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
            rows = inputs[0].flatten(0, -2).float()
            found[name] = found.get(name, torch.zeros(rows.shape[1], rows.shape[1])) + rows.T @ rows

        return hook

    handles = [linear.register_forward_pre_hook(note(name)) for name, linear in _linears(layer)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
