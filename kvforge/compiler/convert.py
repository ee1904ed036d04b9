"""Streaming a checkpoint's tensors into the engine's one weights file."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.draft_head import tokens_of
from kvforge.checkpoint.finite import check_finite
from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.compiler.cpu_graph import (
    AnyLinear,
    draft_linears,
    dtype_of_packed,
    linears,
    packed_tensors,
    predict_linears,
    stack_packed,
)
from kvforge.compiler.stream_basis import Basis, StatesBasis, StreamBasis, can_change, rotate
from model_defs import ModelConfig
from model_defs.draft_graph import EMBEDDING as EMBEDDING_OF_HEAD
from model_defs.draft_graph import PREFIX, TOKEN_OF, head_buffers
from model_defs.draft_head import DraftHead
from model_defs.head_kinds import HEAD_CODE
from model_defs.mtp_graph import TURN
from model_defs.predict_graph import frequencies_of, predict_weight_specs
from model_defs.prediction import Prediction
from model_defs.rope import frequency_buffer, inverse_frequencies, rope_tables
from model_defs.rotary_rows import engine_rows, factors_of_rows, order_of_rows
from model_defs.token_scores import scorer_specs
from model_defs.weights import FLOAT32, Source, WeightSpec, weight_specs
from plugins.packed_linear.int4 import Codes, join, round_to_codes
from plugins.packed_linear.int4_steps import SteppedCodes, in_steps, join_steps, round_in_steps
from plugins.packed_linear.packing import IN_STEPS, INT4, WITH_ZEROS

FREQUENCIES = frequency_buffer(0)
ROPE_TABLES = ("rope_cos", "rope_sin")
EMBEDDING = "embed.weight"


class Converted(NamedTuple):
    """What was written: the number of parameters, and the file's SHA-256 as hexadecimal text."""

    num_parameters: int
    sha256: str


def convert_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    path: Path,
    progress: Callable[[int, int], object] = lambda done, total: None,
    packed_dtype: torch.dtype | None = None,
    num_positions: int = 0,
    predictor: tuple[Checkpoint, Prediction] | None = None,
    rounded: Mapping[str, dict[str, Tensor]] | None = None,
    draft: tuple[Checkpoint, DraftHead] | None = None,
    scorer: Checkpoint | None = None,
    int8_layers: Collection[str] = (),
) -> Converted:
    """Write every tensor of the graphs in ``dtype`` to ``path``.

    With ``packed_dtype`` the weights of linear layers are packed as that, those of ``int8_layers`` as int8, in the
    basis that ``basis_of`` says, or are those of ``rounded`` by the layer's name, which it empties. One fused tensor is
    in memory at a time. The RoPE frequencies are stored beside the weights, in fp32, and cos and sin of the first
    ``num_positions`` positions, which graphs that select chunks have. The tensors of a ``predictor``, of a ``draft``
    head and of a ``scorer`` for a model with one follow, from their own checkpoints, and are not counted.
    ``progress`` is called with the bytes that are written and that will be, as each tensor begins and at the end.

    Raises:
        CheckpointError: a tensor is missing, has the wrong shape or an element that is not finite in ``dtype``.
    """
    weights = weight_specs(config)
    layers = linears(config) if packed_dtype is not None else {}
    basis = basis_of(checkpoint, config, packed_dtype)
    specs: list[TensorSpec] = []
    sources: dict[str, Callable[[], Tensor]] = {}
    for index, (rope, head_dim) in enumerate(config.rotations):
        name, frequencies = frequency_buffer(index), inverse_frequencies(rope, head_dim)
        specs.append(TensorSpec(name, tuple(frequencies.shape), torch.float32))
        sources[name] = partial(_itself, frequencies)
    if num_positions:
        tables = rope_tables(config.rope, config.head_dim, num_positions)
        for name, table in zip(ROPE_TABLES, tables, strict=True):
            specs.append(TensorSpec(name, tuple(table.shape), torch.float32))
            sources[name] = table.contiguous
    of_all = [(checkpoint, weight) for weight in weights]
    if predictor is not None:
        own, prediction = predictor
        for name, frequencies in frequencies_of(prediction).items():
            if name not in sources:
                specs.append(TensorSpec(name, tuple(frequencies.shape), torch.float32))
                sources[name] = partial(_itself, frequencies)
        of_all += [(own, weight) for weight in predict_weight_specs(prediction)]
        layers = {**layers, **(predict_linears(prediction) if packed_dtype is not None else {})}
    bases: dict[int, Basis | None] = {id(checkpoint): basis}
    if draft is not None:
        own, head = draft
        bases[id(own)] = StatesBasis(basis is not None, config.residual_scale)
        layers = {**layers, **(draft_linears(config, head) if packed_dtype is not None else {})}
        made = {f"{PREFIX}{name}": buffer for name, buffer in head_buffers(head).items()}
        if head.is_turned and packed_dtype is not None:
            turn = packed_tensors(rotate(torch.eye(head.width)).to(dtype), layers[TURN], packed_dtype)
            made |= {f"{TURN}.{name}": tensor for name, tensor in turn.items()}
        for name, tensor in (made | {TOKEN_OF: tokens_of(own, head)}).items():
            specs.append(TensorSpec(name, tuple(tensor.shape), tensor.dtype))
            sources[name] = partial(_itself, tensor)
        for weight in HEAD_CODE[head.kind].weight_specs(config, head):
            is_there = weight.name != EMBEDDING_OF_HEAD or own.has(weight.sources[0].name)
            table = WeightSpec(weight.name, weights[0].sources)
            of_all.append((own, weight) if is_there else (checkpoint, table))
    if scorer is not None:
        bases[id(scorer)] = basis
        of_all += [(scorer, weight) for weight in scorer_specs(config)]
    for origin, weight in of_all:
        layer = weight.name.removesuffix(".weight")
        of_model = bases.get(id(origin))
        if layer in layers and packed_dtype is not None:
            known = {} if rounded is None or origin is not checkpoint else rounded.get(layer, {})
            own_dtype = torch.int8 if layer in int8_layers else packed_dtype
            packed = _Packed(origin, weight, layers[layer], own_dtype, of_model, known)
            for name, tensor in packed.layout().items():
                specs.append(TensorSpec(f"{layer}.{name}", tuple(tensor.shape), tensor.dtype))
                sources[f"{layer}.{name}"] = partial(packed.take, name)
        if layer not in layers or weight.name == EMBEDDING:
            stored = torch.float32 if weight.name.rpartition(".")[2] in FLOAT32 else dtype
            specs.append(TensorSpec(weight.name, weight.shape, stored))
            sources[weight.name] = partial(fuse, origin, weight, stored, of_model)

    written, total = 0, sum(spec.num_bytes for spec in specs)

    def produce(spec: TensorSpec) -> Tensor:
        nonlocal written
        progress(written, total)
        written += spec.num_bytes
        return sources[spec.name]()

    digest = write_safetensors(path, specs, produce)
    progress(written, total)
    return Converted(sum(weight.num_parameters for weight in weights), digest)


def basis_of(checkpoint: Checkpoint, config: ModelConfig, packed_dtype: torch.dtype | None) -> StreamBasis | None:
    """Return the basis of the residual stream of an engine with weights packed so; None where it stays as it is."""
    is_other = packed_dtype == torch.int8 or (packed_dtype in INT4 and not has_codes(checkpoint, config))
    if not is_other or not can_change(config):
        return None
    return StreamBasis(config, lambda spec: fuse(checkpoint, spec, None))


def has_codes(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether weights of a checkpoint are stored in 4 bits, which an int4 engine keeps as they are."""
    return any(checkpoint.has_codes(source.name) for spec in weight_specs(config) for source in spec.sources)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class _Packed:
    """The packed tensors of one linear layer, made when the first of them is taken, unless they are ``known``, and
    dropped one by one. Experts are read and packed one after the other."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: WeightSpec,
        layer: AnyLinear,
        dtype: torch.dtype,
        basis: Basis | None,
        known: dict[str, Tensor],
    ) -> None:
        self.checkpoint, self.spec, self.layer, self.basis = checkpoint, spec, layer, basis
        self.dtype = dtype_of_packed(layer, dtype)
        self._left = known

    def layout(self) -> dict[str, Tensor]:
        """Return the tensors without their contents."""
        return packed_tensors(torch.empty(self.spec.shape, device="meta"), self.layer, self.dtype)

    def take(self, name: str) -> Tensor:
        """Return a tensor, once."""
        if not self._left:
            parts = (self._pack(matrix) for matrix in self.spec.matrices)
            self._left = stack_packed(parts, self.spec.stacked) if self.spec.stacked else next(parts)
        return self._left.pop(name)

    def _pack(self, spec: WeightSpec) -> dict[str, Tensor]:
        if self.dtype in INT4 and any(self.checkpoint.has_codes(source.name) for source in spec.sources):
            codes = self._steps(spec) if self.dtype == IN_STEPS else self._codes(spec)
            return packed_tensors(codes, self.layer, self.dtype)
        dtype = self.dtype if self.dtype.is_floating_point else None
        fused = fuse(self.checkpoint, spec, dtype, self.basis, is_head=spec.name == EMBEDDING)
        return packed_tensors(fused, self.layer, self.dtype)

    def _codes(self, spec: WeightSpec) -> Codes:
        """The parts in 4 bits: those that are stored so as they are, others rounded."""
        zero_points, parts = self.dtype == WITH_ZEROS, []
        for source in spec.sources:
            codes = self._stored_codes(source)
            codes = round_to_codes(_read(self.checkpoint, source), zero_points) if codes is None else codes
            parts.append(codes.with_zeros() if zero_points else codes)
        return join(parts)

    def _steps(self, spec: WeightSpec) -> SteppedCodes:
        """The same where scales are whole steps."""
        parts = []
        for source in spec.sources:
            codes = self._stored_codes(source)
            stepped = None if codes is None else in_steps(codes)
            parts.append(round_in_steps(_read(self.checkpoint, source)) if stepped is None else stepped)
        return join_steps(parts)

    def _stored_codes(self, source: Source) -> Codes | None:
        """The codes of a source in the order of the engine's rows, if it is stored in 4 bits."""
        self.checkpoint.check(source.name, source.shape)
        codes = self.checkpoint.codes(source.name) if source.rows is None else None
        if codes is None or source.rotary is None:
            return codes
        return codes.rows(
            order_of_rows(source.rotary, source.shape[0]), factors_of_rows(source.rotary, source.shape[0])
        )


def _read(checkpoint: Checkpoint, source: Source, dtype: torch.dtype | None = None) -> Tensor:
    """A source as the engine has it, in ``dtype``; with None as it is stored, or in fp32 where it was changed."""
    if source.rows is not None:
        rows = checkpoint.read(source.name, source.shape, dtype, rows=(source.rows.start, source.rows.stop))
        return rows.permute(*range(rows.dim())[::-1]).contiguous() if source.rows.transposed else rows
    if source.rotary is None and not source.offset:
        return checkpoint.read(source.name, source.shape, dtype)
    rows = checkpoint.read(source.name, source.shape)
    if source.offset:
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) + source.offset
    rows = rows if source.rotary is None else engine_rows(source.rotary, rows)
    rows = rows.to(dtype or rows.dtype)
    check_finite(rows, source.name, checkpoint.path)
    return rows


def fuse(
    checkpoint: Checkpoint,
    spec: WeightSpec,
    dtype: torch.dtype | None,
    basis: Basis | None = None,
    is_head: bool = False,
) -> Tensor:
    """The parts of a tensor in ``dtype``; with None exactly, as they are stored, and in fp32 where that is wider, or
    in another ``basis``."""
    if spec.stacked:
        matrices = ({"": fuse(checkpoint, matrix, dtype, basis)} for matrix in spec.matrices)
        return stack_packed(matrices, spec.stacked)[""]
    change = None if basis is None else basis.change(spec.name, is_head)
    if change is not None:
        changed = change(fuse(checkpoint, spec, None))
        changed = changed if dtype is None else changed.to(dtype)
        check_finite(changed, spec.sources[0].name, checkpoint.path)
        return changed
    parts = [_read(checkpoint, source, dtype) for source in spec.sources]
    if dtype is None and any(part.dtype == torch.float64 for part in parts):
        return fuse(checkpoint, spec, torch.float32)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
