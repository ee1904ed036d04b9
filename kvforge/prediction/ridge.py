"""The maps in closed form: ridge regression from the auxiliary model's normed inputs to the base's K and V."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvforge.common.errors import KvforgeError
from kvforge.rewire.inputs import LayerInputs, record_inputs
from kvforge.rewire.least_squares import InputSums, ResidualSums, Unexplained, solve
from kvforge.rewire.projections import input_eps, normalise, read_projection
from kvforge.rewire.source import PlainCheckpoint
from model_defs.prediction import MAPS, Prediction

Progress = Callable[[str, int, int], object]
"""Stage, steps done, steps in all."""


@dataclass(frozen=True)
class MapFit:
    """Shares of the variance of an owner's K and V, before norm and rotation, that its map does not explain, on
    samples that were not fitted to; ``layer`` is the auxiliary layer that it reads."""

    owner: int
    layer: int
    k: float
    v: float


@torch.inference_mode()
def fit_maps(
    base: PlainCheckpoint,
    auxiliary: PlainCheckpoint,
    prediction: Prediction,
    samples: Sequence[Sequence[int]],
    ridge: float,
    work: Path,
    progress: Progress = lambda stage, done, total: None,
) -> tuple[list[MapFit], dict[str, Tensor]]:
    """Return what the maps miss, and their tensors by name, float32.

    Both models run over ``samples`` (token ids) in float32 with their activations in files below ``work``, which are
    removed. Maps are regularised towards 0, their biases not.

    Raises:
        CheckpointError: activations are not finite.
        KvforgeError: ``ridge`` is too small for these samples.
    """
    inputs: dict[str, LayerInputs] = {}
    for name, source in (("base", base), ("auxiliary", auxiliary)):
        (work / name).mkdir()
        inputs[name] = record_inputs(source, samples, work / name, 0, progress=progress)
    gains = {layer: read_projection(auxiliary, layer).gain for layer in set(prediction.layers)}
    sums: dict[int, tuple[InputSums, Tensor]] = {}
    fits, tensors = [], {}

    def read(layer: int, sample: int) -> Tensor:
        """The normed input of an auxiliary layer ``[T, hidden]``, float64."""
        return normalise(inputs["auxiliary"].read(layer, sample), input_eps(auxiliary.config)) * gains[layer]

    for done, owner in enumerate(prediction.base.owners):
        progress("fitting", done, len(prediction.base.owners))
        layer = prediction.layer_of(owner)
        if layer not in sums:
            sums[layer] = _factored(partial(read, layer), inputs["auxiliary"], gains[layer], ridge)
        projection = read_projection(base, owner)
        residuals = ResidualSums(len(gains[layer]), len(projection.weight))
        for sample in inputs["base"].fitted:
            residuals.add(read(layer, sample), projection(inputs["base"].read(owner, sample)))
        weight, bias = solve(*sums[layer], residuals)
        missed = Unexplained()
        for sample in inputs["base"].held_out:
            missed.add(projection(inputs["base"].read(owner, sample)), read(layer, sample) @ weight.T + bias)
        fits.append(MapFit(owner, layer, *missed.shares(projection.sizes)))
        for index, part in enumerate(("k_proj", "v_proj")):
            tensors[f"{MAPS}.{owner}.{part}.weight"] = weight.chunk(2)[index].float().contiguous()
            tensors[f"{MAPS}.{owner}.{part}.bias"] = bias.chunk(2)[index].float().contiguous()
    progress("fitting", len(fits), len(fits))
    for each in inputs.values():
        each.remove()
    return fits, tensors


def _factored(
    read: Callable[[int], Tensor], inputs: LayerInputs, gain: Tensor, ridge: float
) -> tuple[InputSums, Tensor]:
    sums = InputSums(len(gain), intercept=True)
    for sample in inputs.fitted:
        sums.add(read(sample))
    try:
        return sums, sums.factor(ridge)
    except torch.linalg.LinAlgError:
        raise KvforgeError(
            f"The normal equations of the maps cannot be solved with --ridge {ridge:g}; give a larger one."
        ) from None
