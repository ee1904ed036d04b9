"""Closed-form K and V projections of the owners above a cut, from the cut's single input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.common.errors import KvforgeError
from kvforge.rewire.initialise import group_of, student_name
from kvforge.rewire.inputs import LayerInputs
from kvforge.rewire.least_squares import InputSums, ResidualSums, Unexplained, solve
from kvforge.rewire.projections import KeyValueProjection, average, input_eps, normalise, read_projection
from kvforge.rewire.source import PlainCheckpoint
from model_defs import ModelConfig


@dataclass(frozen=True)
class OwnerFit:
    """Shares of variance that are not explained, on samples that were not fitted to.

    ``k`` and ``v``: of the group's target (the mean of its K and V, or MiniCache's merge), by the fitted projections;
    ``fold_k`` and ``fold_v`` by those of ``fold``; ``layers_k`` and ``layers_v``: of each layer's own K and V by the
    fitted ones, mean over the group.
    """

    owner: int
    layers: tuple[int, ...]
    k: float
    v: float
    fold_k: float
    fold_v: float
    layers_k: float
    layers_v: float


Combine = Callable[[Sequence[Tensor]], Tensor]
"""From each layer's K and V of a sample, ``[T, 2 * kv_dim]`` each, to what their one cache is fitted to."""


def mean_target(layers: Sequence[Tensor]) -> Tensor:
    """Return the mean of the layers' K and V."""
    return torch.stack(list(layers)).mean(0)


class CutFit:
    """Least squares from one cut's input: X is the residual stream entering ``cut`` over its root mean square.

    (X^T X + lambda I)^-1 is factored once; each owner adds its own right-hand side.
    """

    def __init__(
        self,
        source: PlainCheckpoint,
        inputs: LayerInputs,
        cut: int,
        ridge: float,
        device: torch.device | str,
        combine: Combine = mean_target,
    ) -> None:
        self.inputs, self.cut, self.device, self.combine = inputs, cut, device, combine
        self.eps = input_eps(source.config)
        self.sums = InputSums(source.config.hidden_size, source.config.qkv_bias, device)
        for sample in inputs.fitted:
            self.sums.add(self.single_input(sample))
        try:
            self.factor = self.sums.factor(ridge)
        except torch.linalg.LinAlgError:
            raise KvforgeError(
                f"The normal equations of cut {cut} cannot be solved with --ridge {ridge:g}; give a larger one."
            ) from None

    def single_input(self, sample: int) -> Tensor:
        """Return X of a sample ``[T, hidden]`` float64."""
        return normalise(self.inputs.read(self.cut, sample).to(self.device), self.eps)

    def targets(self, layers: Sequence[int], group: Sequence[KeyValueProjection], sample: int) -> list[Tensor]:
        """Return each layer's own K and V ``[T, 2 * kv_dim]`` in the source."""
        pairs = zip(layers, group, strict=True)
        return [projection(self.inputs.read(layer, sample).to(self.device)) for layer, projection in pairs]

    def fit(self, layers: Sequence[int], group: Sequence[KeyValueProjection]) -> tuple[Tensor, Tensor]:
        """Return the weight ``[2 * kv_dim, hidden]`` and bias ``[2 * kv_dim]`` for the group's target."""
        weight, bias = prior(group)
        residuals = ResidualSums(weight.shape[1], weight.shape[0], self.device)
        for sample in self.inputs.fitted:
            x = self.single_input(sample)
            y = self.combine(self.targets(layers, group, sample))
            residuals.add(x, y - x @ weight.T - bias)
        delta, shift = solve(self.sums, self.factor, residuals)
        return weight + delta, bias + shift

    def measure(
        self, layers: Sequence[int], group: Sequence[KeyValueProjection], weight: Tensor, bias: Tensor
    ) -> tuple[Unexplained, list[Unexplained]]:
        """Return what projections miss of the group's target, and of each layer, on the samples that are held out."""
        of_target, of_layers = Unexplained(), [Unexplained() for _ in layers]
        for sample in self.inputs.held_out:
            prediction = self.single_input(sample) @ weight.T + bias
            targets = self.targets(layers, group, sample)
            of_target.add(self.combine(targets), prediction)
            for unexplained, target in zip(of_layers, targets, strict=True):
                unexplained.add(target, prediction)
        return of_target, of_layers


def prior(group: Sequence[KeyValueProjection]) -> tuple[Tensor, Tensor]:
    """Return what ``fold`` would take for a group: weight, and bias (zeros where there is none)."""
    weight, bias = average(list(group))
    return weight, weight.new_zeros(weight.shape[0]) if bias is None else bias


@torch.inference_mode()
def fit_owners(
    source: PlainCheckpoint,
    config: ModelConfig,
    inputs: LayerInputs,
    ridge: float,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], object] = lambda stage, done, total: None,
    combine: Combine = mean_target,
) -> tuple[list[OwnerFit], dict[str, Callable[[], Tensor]]]:
    """Fit every owner of ``config`` above its cut to what ``combine`` makes of its group.

    Returns the shares missed, and the projections by tensor name.

    The projections lie in files beside the inputs, in the source's dtypes, until they are asked for. In memory are the
    sums (8 hidden² bytes twice, 8 * 2 kv_dim * hidden of one owner), one group's projections and one sample.
    """
    cut = CutFit(source, inputs, config.cut, ridge, device, combine)
    fits: list[OwnerFit] = []
    fitted: dict[str, Callable[[], Tensor]] = {}
    for done, owner in enumerate(config.upper_owners):
        progress("fitting", done, len(config.upper_owners))
        layers = tuple(group_of(owner, config))
        group = [read_projection(source, layer, device) for layer in layers]
        weight, bias = cut.fit(layers, group)
        of_target, of_layers = cut.measure(layers, group, weight, bias)
        of_fold, _ = cut.measure(layers, group, *prior(group))
        shares = [unexplained.halves() for unexplained in of_layers]
        means = [sum(share[half] for share in shares) / len(shares) for half in (0, 1)]
        fits.append(OwnerFit(owner, layers, *of_target.halves(), *of_fold.halves(), *means))
        fitted |= _store(source, inputs.directory, owner, weight, bias)
    progress("fitting", len(config.upper_owners), len(config.upper_owners))
    return fits, fitted


def _store(
    source: PlainCheckpoint, directory: Path, owner: int, weight: Tensor, bias: Tensor
) -> dict[str, Callable[[], Tensor]]:
    tensors = {}
    for half, part in enumerate(("k", "v")):
        teacher = f"model.layers.{owner}.self_attn.{part}_proj"
        pieces = {"weight": weight.chunk(2)[half]}
        if source.config.qkv_bias:
            pieces["bias"] = bias.chunk(2)[half]
        for kind, piece in pieces.items():
            dtype = source.specs[f"{teacher}.{kind}"].dtype
            tensors[student_name(f"{teacher}.{kind}")] = piece.to("cpu", dtype).contiguous()
    file = directory / f"owner-{owner}.safetensors"
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    write_safetensors(file, specs, lambda spec: tensors[spec.name])

    def read(name: str) -> Callable[[], Tensor]:
        return lambda: load_file(file)[name]

    return {name: read(name) for name in tensors}
