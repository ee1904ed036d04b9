"""What enters each layer of the source on the calibration text, layer by layer, on disk."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvforge.common.errors import CheckpointError
from kvforge.rewire.source import PlainCheckpoint
from kvforge.swiftkv import DecoderLayer, load_weights, make_layout
from model_defs.layers import scaled

HELD_OUT_EVERY = 8


class LayerInputs:
    """float32 residual streams ``[T, hidden]`` of samples of ``lengths`` tokens: a file per layer in ``directory``."""

    def __init__(self, directory: Path, lengths: Sequence[int], hidden_size: int) -> None:
        self.directory, self.lengths, self.hidden_size = directory, tuple(lengths), hidden_size
        self.starts = [sum(self.lengths[:index]) for index in range(len(self.lengths))]

    @property
    def held_out(self) -> list[int]:
        """Samples that are measured on and not fitted to: every eighth, or the last of fewer."""
        return list(range(HELD_OUT_EVERY - 1, len(self.lengths), HELD_OUT_EVERY)) or [len(self.lengths) - 1]

    @property
    def fitted(self) -> list[int]:
        """The other samples."""
        return sorted(set(range(len(self.lengths))) - set(self.held_out))

    def file(self, layer: int) -> Path:
        """Return where the inputs of a layer lie."""
        return self.directory / f"inputs-{layer}.f32"

    def read(self, layer: int, sample: int) -> Tensor:
        """Return what enters ``layer`` in ``sample``, ``[T, hidden]``."""
        width, count = self.hidden_size, self.lengths[sample]
        values = np.fromfile(
            self.file(layer), np.float32, count * width, offset=self.starts[sample] * width * np.float32().itemsize
        )
        return torch.from_numpy(values).view(count, width)

    def remove(self) -> None:
        """Remove the files of all layers."""
        for file in self.directory.glob("inputs-*.f32"):
            file.unlink()


@torch.inference_mode()
def record_inputs(
    source: PlainCheckpoint,
    samples: Sequence[Sequence[int]],
    directory: Path,
    first: int,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], object] = lambda stage, done, total: None,
    with_output: bool = False,
) -> LayerInputs:
    """Run the source in float32 and keep what enters layers ``first`` and up, in files in ``directory``; with
    ``with_output`` also what the last layer gives, as the input of a layer after it.

    One layer's weights (or the embedding) and one sample's activations are in memory at a time; the files take
    4 * tokens * hidden bytes per layer kept, and one layer more while it runs.

    Raises:
        CheckpointError: the activations are not finite.
    """
    config = source.config
    inputs = LayerInputs(directory, [len(ids) for ids in samples], config.hidden_size)
    _write(inputs, 0, _embedded(source, samples))
    last = config.num_layers - 1 + with_output
    for index in range(last):
        progress("calibrating", index, last)
        with torch.device("meta"):
            layer = DecoderLayer(config, index)
        load_weights(layer, source.checkpoint, torch.float32, f"model.layers.{index}.")
        layer.to(device)

        def run(sample: int, index: int = index, layer: DecoderLayer = layer) -> Tensor:
            hidden = inputs.read(index, sample).to(device)
            return layer(hidden[None], None, make_layout(config, len(hidden), device=device))[0]

        _write(inputs, index + 1, run)
        del layer, run
        if index < first:
            inputs.file(index).unlink()
    progress("calibrating", last, last)
    return inputs


def _embedded(source: PlainCheckpoint, samples: Sequence[Sequence[int]]) -> Callable[[int], Tensor]:
    weight, scale = source.checkpoint.read_raw("model.embed_tokens.weight"), source.config.embedding_scale
    return lambda sample: scaled(weight[torch.tensor(samples[sample])].float(), scale)


def _write(inputs: LayerInputs, layer: int, make: Callable[[int], Tensor]) -> None:
    with inputs.file(layer).open("wb") as file:
        for sample in range(len(inputs.lengths)):
            hidden = make(sample)
            if not bool(hidden.isfinite().all()):
                raise CheckpointError(
                    f"Calibration met numbers that are not finite entering layer {layer}; the weights are damaged."
                )
            file.write(memoryview(hidden.cpu().contiguous().numpy()))
