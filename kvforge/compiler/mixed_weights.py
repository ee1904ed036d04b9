"""Which linear layers are int8 where all others have 4 bits: those where 4 bits lose most for the bytes they save.

What they lose is measured: the divergence of the model in which one group of layers is rounded from the exact one, on a
calibration text. A group has the layers that are alike in a stretch of the model, because a measurement takes a run of
the whole model, and layers that are alike and near each other lose alike.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from kvforge.common.errors import BuildError
from kvforge.compiler.cpu_graph import AnyLinear
from kvforge.compiler.layer_pass import LayerPass, Progress, Read
from kvforge.compiler.options import ResolvedOptions
from kvforge.costs.weights import bytes_more_as_int8, step_weight_bytes, step_weights, weight_bits
from model_defs import ModelConfig
from plugins.packed_linear.int4 import GROUP_DEPTH, LARGEST_CODE, MIDDLE, nearest_levels

STRETCHES = 3
"""Into how many groups layers that are alike are divided."""
NUM_SAMPLES, NUM_TOKENS = 2, 128
"""Of the calibration text: losses of groups differ by factors."""

_LAYER = re.compile(r"layers\.\d+\.")


def choose_int8_layers(
    config: ModelConfig,
    options: ResolvedOptions,
    read: Read,
    samples: Sequence[Sequence[int]],
    bits: float,
    progress: Progress,
) -> tuple[str, ...]:
    """Return the names of layers that are int8 so that the weights a decode step reads have at most ``bits`` bits on
    average, in the order of the model; ``samples`` are as ``LayerPass.run`` takes them.

    Raises BuildError where all layers in 4 bits have more bits. ``progress`` is called with the bytes that the
    layers measured so far would take, and all layers.
    """
    dtype = options.weight_dtype
    least = step_weight_bytes(config, dtype)
    room = bits / 8 * step_weights(config) - least
    if room < 0:
        raise BuildError(
            f"--weight-bits is {bits:g}, and {dtype} weights of this model have {weight_bits(config, least):.2f} bits; "
            "give more, or leave it out."
        )
    text = [ids[:NUM_TOKENS] for ids in samples[:NUM_SAMPLES]]
    run = _Rounded(config, options, read)
    exact = run.logits(text, ())
    groups = groups_of(run.names)
    losses: dict[str, float] = {}
    sizes = {name: bytes_more_as_int8(config, dtype, (name,)) for name in run.names}
    for names in groups:
        progress(sum(sizes[name] for name in losses), sum(sizes.values()))
        loss = _divergence(exact, run.logits(text, names))
        total = sum(sizes[name] for name in names)
        losses |= {name: loss * sizes[name] / max(total, 1) for name in names}
    chosen = most_valuable(losses, sizes, room)
    return tuple(name for name in run.names if name in chosen)


def groups_of(names: Iterable[str]) -> list[list[str]]:
    """Return layers, by their names in the order of the model, in groups of those that are alike, each kind's in up to
    STRETCHES parts of about the same length."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_LAYER.sub("", name), []).append(name)
    groups = []
    for own in kinds.values():
        ends = [len(own) * part // STRETCHES for part in range(STRETCHES + 1)]
        groups += [own[first:last] for first, last in itertools.pairwise(ends) if first < last]
    return groups


def most_valuable(losses: Mapping[str, float], sizes: Mapping[str, int], room: float) -> set[str]:
    """Return the names with the largest loss for their size, which together take at most ``room``."""
    chosen = set()
    for name in sorted(losses, key=lambda name: -losses[name] / max(sizes[name], 1)):
        if sizes[name] <= room:
            chosen.add(name)
            room -= sizes[name]
    return chosen


class _Rounded(LayerPass):
    """The model with some layers rounded to the nearest of 4 bits. ``names``: all layers that a decode step reads, in
    order, once it has run."""

    gives_logits = True

    def __init__(self, config: ModelConfig, options: ResolvedOptions, read: Read) -> None:
        super().__init__(replace(config, early_exit=False), options, read)  # whose head no decode step reads
        self.names: dict[str, None] = {}
        self._rounded: Collection[str] = ()

    def logits(self, text: Sequence[Sequence[int]], rounded: Collection[str]) -> Tensor:
        """Return those of all tokens, ``[T, vocab]``, with the layers of these names ``rounded``."""
        self._rounded = rounded
        return self.run(text)

    def visit(self, name: str, weight: Tensor, layer: AnyLinear, rows: Tensor) -> Tensor:
        """Round the weight where that is asked for."""
        self.names[name] = None
        return _nearest(weight) if name in self._rounded else weight


def _nearest(weight: Tensor) -> Tensor:
    """Return ``weight`` ``[N, K]`` rounded in groups of 32 inputs, by each group's largest magnitude."""
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP_DEPTH)).unflatten(1, (-1, GROUP_DEPTH))
    scale = groups.abs().amax(-1, keepdim=True) / (LARGEST_CODE / 2)
    return (nearest_levels(groups, scale, MIDDLE) * scale).flatten(1)[:, : weight.shape[1]]


def _divergence(exact: Tensor, rounded: Tensor) -> float:
    """Return the mean of KL(exact || rounded) over the distributions that logits ``[T, vocab]`` describe."""
    log_p, log_q = exact.log_softmax(-1), rounded.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
