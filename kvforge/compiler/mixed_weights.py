"""Which linear layers are int8 where all others have 4 bits: those where 4 bits lose most for the bytes they save.

What they lose is measured: the divergence of the model in which one group of layers is rounded from the exact one, on a
calibration text. Each is rounded as in an engine, by the text, which helps some layers more than others. A group has
the layers that are alike in a stretch of the model, because a measurement takes a run of the whole model, and layers
that are alike and near each other lose alike.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvforge.common.errors import BuildError
from kvforge.compiler.cpu_graph import AnyLinear, dtype_of_packed
from kvforge.compiler.layer_pass import LayerPass, Progress, Read
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.round_by_text import moments_of, rounded_by
from kvforge.costs.weights import bytes_more_as_int8, step_weight_bytes, step_weights, weight_bits
from model_defs import ModelConfig
from plugins.packed_linear.int4 import Codes
from plugins.packed_linear.int4_steps import SteppedCodes
from plugins.packed_linear.int8 import ByteCodes

AnyCodes = ByteCodes | Codes | SteppedCodes

STRETCHES = 3
"""Into how many groups layers that are alike are divided."""
NUM_SAMPLES, NUM_TOKENS = 2, 128
"""Of the calibration text, apart from what weights are rounded by: losses of groups differ by factors."""

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

    Raises BuildError where all layers in 4 bits have more bits. ``progress`` is called with the weights that are
    rounded to be measured, and all of them.
    """
    dtype = options.weight_dtype
    least = step_weight_bytes(config, dtype)
    room = bits / 8 * step_weights(config) - least
    if room < 0:
        raise BuildError(
            f"--weight-bits is {bits:g}, and {dtype} weights of this model have {weight_bits(config, least):.2f} bits; "
            "give more, or leave it out."
        )
    found = _Codes(_without_exit(config), options, read, progress)
    found.run(samples[NUM_SAMPLES:] or samples)
    text = [ids[:NUM_TOKENS] for ids in samples[:NUM_SAMPLES]]
    run = _Rounded(_without_exit(config), options, read, found.codes)
    exact = run.logits(text, ())
    losses: dict[str, float] = {}
    sizes = {name: bytes_more_as_int8(config, dtype, (name,)) for name in found.codes}
    for names in groups_of(sizes):
        loss = _divergence(exact, run.logits(text, names))
        total = sum(sizes[name] for name in names)
        losses |= {name: loss * sizes[name] / max(total, 1) for name in names}
    chosen = most_valuable(losses, sizes, room)
    return tuple(name for name in sizes if name in chosen)


def _without_exit(config: ModelConfig) -> ModelConfig:
    """Return a model without the early exit, whose head no decode step reads."""
    return replace(config, early_exit=False)


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


class _Codes(LayerPass):
    """Rounds each layer by the inputs that it has in the exact model: ``codes``, of the one or of each expert; None of
    experts that no token came to."""

    def __init__(self, config: ModelConfig, options: ResolvedOptions, read: Read, progress: Progress) -> None:
        super().__init__(config, options, read, progress)
        self.codes: dict[str, list[AnyCodes | None]] = {}

    def visit(self, name: str, weight: Tensor, layer: AnyLinear, rows: Tensor) -> Tensor:
        """Round the weight, and go on with it as it is."""
        assert self.options.packed_dtype is not None
        dtype = dtype_of_packed(layer, self.options.packed_dtype)
        found = rounded_by(weight, moments_of(name, rows), dtype) if len(rows) else None
        self.codes.setdefault(name, []).append(found)
        return weight


class _Rounded(LayerPass):
    """The model with some layers as their ``codes`` have them."""

    gives_logits = True

    def __init__(
        self,
        config: ModelConfig,
        options: ResolvedOptions,
        read: Read,
        codes: Mapping[str, Sequence[AnyCodes | None]],
    ) -> None:
        super().__init__(config, options, read)
        self._codes = codes
        self._left: dict[str, Iterator[AnyCodes | None]] = {}

    def logits(self, text: Sequence[Sequence[int]], rounded: Collection[str]) -> Tensor:
        """Return those of all tokens, ``[T, vocab]``, with the layers of these names ``rounded``."""
        self._left = {name: iter(self._codes[name]) for name in rounded}
        return self.run(text)

    def visit(self, name: str, weight: Tensor, layer: AnyLinear, rows: Tensor) -> Tensor:
        """Return what is left of the weight where its layer is rounded."""
        codes = next(self._left[name]) if name in self._left else None
        return weight if codes is None else codes.dequantize()


def _divergence(exact: Tensor, rounded: Tensor) -> float:
    """Return the mean of KL(exact || rounded) over the distributions that logits ``[T, vocab]`` describe."""
    log_p, log_q = exact.log_softmax(-1), rounded.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
