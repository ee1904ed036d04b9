"""Closed-form projections above a cut, from its single input: K and V of owners, and what updates states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.common.errors import KvforgeError
from kvforge.rewire.initialise import group_of
from kvforge.rewire.inputs import LayerInputs
from kvforge.rewire.least_squares import InputSums, ResidualSums, Unexplained, solve
from kvforge.rewire.projections import Projection, average, input_eps, normalise, read_projection
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


@dataclass(frozen=True)
class StateFit:
    """The same of what updates a layer's state, by the names of its tensors: the layer's own is the target."""

    layer: int
    shares: dict[str, float]
    fold: dict[str, float]


Combine = Callable[[Sequence[Tensor]], Tensor]
"""From each layer's K and V of a sample, ``[T, 2 * kv_dim]`` each, to what their one cache is fitted to."""

Fitted = dict[str, Callable[[], Tensor]]
"""By tensor name: what reads it."""


def mean_target(layers: Sequence[Tensor]) -> Tensor:
    """Return the mean of the layers' K and V."""
    return torch.stack(list(layers)).mean(0)


class CutFit:
    """Least squares from one cut's input: X is the residual stream entering ``cut`` over its root mean square.

    (X^T X + lambda I)^-1 is factored once for projections with a bias, once for those without; each adds its own
    right-hand side.
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
        self.inputs, self.cut, self.ridge, self.device, self.combine = inputs, cut, ridge, device, combine
        self.eps = input_eps(source.config)
        self._factored: dict[bool, tuple[InputSums, Tensor]] = {}

    def _normal_equations(self, has_bias: bool) -> tuple[InputSums, Tensor]:
        """Return the sums and their factor; raises KvforgeError where there is none."""
        if has_bias not in self._factored:
            sums = InputSums(self.inputs.hidden_size, has_bias, self.device)
            for sample in self.inputs.fitted:
                sums.add(self.single_input(sample))
            try:
                self._factored[has_bias] = sums, sums.factor(self.ridge)
            except torch.linalg.LinAlgError:
                raise KvforgeError(
                    f"The normal equations of cut {self.cut} cannot be solved with --ridge {self.ridge:g}; give a "
                    "larger one."
                ) from None
        return self._factored[has_bias]

    def single_input(self, sample: int) -> Tensor:
        """Return X of a sample ``[T, hidden]`` float64."""
        return normalise(self.inputs.read(self.cut, sample).to(self.device), self.eps)

    def targets(self, layers: Sequence[int], group: Sequence[Projection], sample: int) -> list[Tensor]:
        """Return what each layer's own projection makes in the source, ``[T, outputs]``."""
        pairs = zip(layers, group, strict=True)
        return [projection(self.inputs.read(layer, sample).to(self.device)) for layer, projection in pairs]

    def fit(self, layers: Sequence[int], group: Sequence[Projection]) -> tuple[Tensor, Tensor]:
        """Return the weight ``[outputs, hidden]`` and bias ``[outputs]`` for the group's target."""
        weight, bias = prior(group)
        residuals = ResidualSums(weight.shape[1], weight.shape[0], self.device)
        for sample in self.inputs.fitted:
            x = self.single_input(sample)
            y = self.combine(self.targets(layers, group, sample))
            residuals.add(x, y - x @ weight.T - bias)
        delta, shift = solve(*self._normal_equations(group[0].bias is not None), residuals)
        return weight + delta, bias + shift

    def measure(
        self, layers: Sequence[int], group: Sequence[Projection], weight: Tensor, bias: Tensor
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


def prior(group: Sequence[Projection]) -> tuple[Tensor, Tensor]:
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
) -> tuple[list[OwnerFit], Fitted]:
    """Fit every owner of ``config`` above its cut to what ``combine`` makes of its group.

    Returns the shares missed, and the projections by tensor name.

    The projections lie in files beside the inputs, in the source's dtypes, until they are asked for. In memory are the
    sums (8 hidden² bytes twice, 8 * 2 kv_dim * hidden of one owner), one group's projections and one sample.
    """
    cut = CutFit(source, inputs, config.cut, ridge, device, combine)
    fits: list[OwnerFit] = []
    fitted: Fitted = {}
    for done, owner in enumerate(config.upper_owners):
        progress("fitting", done, len(config.upper_owners))
        layers = tuple(group_of(owner, config))
        group = [read_projection(source, layer, device) for layer in layers]
        weight, bias = cut.fit(layers, group)
        of_target, of_layers = cut.measure(layers, group, weight, bias)
        of_fold, _ = cut.measure(layers, group, *prior(group))
        sizes = group[0].sizes
        shares = [unexplained.shares(sizes) for unexplained in of_layers]
        means = [sum(share[half] for share in shares) / len(shares) for half in (0, 1)]
        fits.append(OwnerFit(owner, layers, *of_target.shares(sizes), *of_fold.shares(sizes), *means))
        fitted |= _store(source, inputs.directory, group[0], weight, bias)
    progress("fitting", len(config.upper_owners), len(config.upper_owners))
    return fits, fitted


@torch.inference_mode()
def fit_states(
    source: PlainCheckpoint,
    config: ModelConfig,
    inputs: LayerInputs,
    ridge: float,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], object] = lambda stage, done, total: None,
) -> tuple[list[StateFit], Fitted]:
    """Fit what updates the state of every layer of ``config`` above its cut to the layer's own, as ``fit_owners``
    does."""
    cut = CutFit(source, inputs, config.cut, ridge, device)
    fits: list[StateFit] = []
    fitted: Fitted = {}
    for done, layer in enumerate(config.upper_linear):
        progress("fitting states", done, len(config.upper_linear))
        own = read_projection(source, layer, device)
        weight, bias = cut.fit([layer], [own])
        names = [part.name.split(".")[-2].removesuffix("_swiftkv") for part in own.parts]
        missed, by_fold = (
            dict(zip(names, cut.measure([layer], [own], *made)[0].shares(own.sizes), strict=True))
            for made in ((weight, bias), prior([own]))
        )
        fits.append(StateFit(layer, missed, by_fold))
        fitted |= _store(source, inputs.directory, own, weight, bias)
    progress("fitting states", len(config.upper_linear), len(config.upper_linear))
    return fits, fitted


def _store(source: PlainCheckpoint, directory: Path, like: Projection, weight: Tensor, bias: Tensor) -> Fitted:
    tensors = {}
    for kind, whole in (("weight", weight), ("bias", bias)):
        if kind == "bias" and like.bias is None:
            continue
        for part, rows in zip(like.parts, whole.split(like.sizes), strict=True):
            name, teacher = (f"{each.removesuffix('weight')}{kind}" for each in (part.name, part.like))
            tensors[name] = rows.to("cpu", source.specs[teacher].dtype).contiguous()
    file = directory / f"{next(iter(tensors))}.safetensors"
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    write_safetensors(file, specs, lambda spec: tensors[spec.name])

    def read(name: str) -> Callable[[], Tensor]:
        return lambda: load_file(file)[name]

    return {name: read(name) for name in tensors}
