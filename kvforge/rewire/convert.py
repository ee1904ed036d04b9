"""Makes a SwiftKV checkpoint from a plain one: measures where it must, fits, writes."""

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvforge.checkpoint.copy_files import copy_files
from kvforge.checkpoint.output import check_output
from kvforge.common.errors import KvforgeError
from kvforge.common.figures import check_figure
from kvforge.common.staging import staging_directory
from kvforge.rewire.cut_search import Candidate, choose_cut, measure_cuts
from kvforge.rewire.exit_head import exit_tensors, fit_exit_map
from kvforge.rewire.initialise import new_tensors
from kvforge.rewire.inputs import record_inputs
from kvforge.rewire.minicache import shared_target
from kvforge.rewire.options import FITTED_INITS, INITS, RewireOptions
from kvforge.rewire.plot import plot_similarity
from kvforge.rewire.ridge import Fitted, OwnerFit, StateFit, fit_owners, fit_states, mean_target
from kvforge.rewire.similarity import input_similarity
from kvforge.rewire.source import PlainCheckpoint, open_source
from kvforge.rewire.write import write_config, write_weights
from kvforge.tokenization.calibration import calibration_samples
from model_defs import ModelConfig, ModelError

Progress = Callable[[str, int, int], object]
"""Stage, steps done, steps in all."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What calibration found. ``candidates`` is empty unless the cut was to be chosen, ``owners``, ``states`` and
    ``fitted`` (the projections by tensor name) unless they were fitted, ``similarity`` ``[layers, layers]`` None unless
    it was needed."""

    cut: int
    num_tokens: int = 0
    candidates: tuple[Candidate, ...] = ()
    similarity: Tensor | None = None
    owners: tuple[OwnerFit, ...] = ()
    states: tuple[StateFit, ...] = ()
    fitted: Fitted = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RewireSummary:
    """What was written. ``weight_bytes`` are those of all tensors, ``new_parameters`` counts what SwiftKV added;
    ``init`` is "" where the cut is blind, and ``num_anchors`` is 0 where it is not;
    ``owners``, ``states``, ``candidates`` and ``similarity`` as in :class:`Measurement`."""

    output: str
    model_type: str
    num_layers: int
    cut: int
    group_size: int
    init: str
    num_anchors: int
    early_exit: bool
    with_teacher: bool
    weight_bytes: int
    new_parameters: int
    num_tokens: int
    owners: tuple[OwnerFit, ...] = ()
    states: tuple[StateFit, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    similarity: tuple[tuple[float, ...], ...] = ()


def rewire_checkpoint(
    source_path: str | Path,
    output: str | Path,
    options: RewireOptions,
    *,
    calibration: str | Path | None = None,
    plot: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> RewireSummary:
    """Write the SwiftKV checkpoint of a plain one to ``output``, whole or not at all; ``overwrite`` replaces one there.

    One tensor is in memory at a time; calibration takes what :func:`record_inputs` and :func:`fit_owners` say. It runs,
    on the text file ``calibration`` or on generated text, where the cut is to be chosen, ``init`` is one of
    ``FITTED_INITS``, or ``plot`` names a file for the similarity of the layers' inputs.

    Raises:
        CheckpointError: the source cannot be read, is quantized, a SwiftKV one already, or incomplete.
        KvforgeError: ``output`` may not be written (``check_output``), the cut is outside the model, no cut is within
            the quality budget, the calibration text is unusable, or the disk or the GPU is full.
    """
    output, source = Path(output), open_source(source_path)
    figure = None if plot is None else Path(plot)
    text = None if calibration is None else Path(calibration)
    check_output(output, [source.checkpoint.path, text], overwrite)
    _check(source, options)
    if figure is not None:
        check_figure(figure)
    samples: list[list[int]] = []
    if options.cut is None or options.init in FITTED_INITS or figure is not None:
        samples = _samples(source, options, text)
    with staging_directory(output, replace=overwrite) as staging:
        work = staging / ".calibration"
        work.mkdir()
        try:
            found = _measure(source, options, samples, work, figure is not None, progress)
        except torch.OutOfMemoryError:
            raise KvforgeError(
                "The GPU has too little memory to calibrate on; give a smaller --num-tokens, or set "
                "CUDA_VISIBLE_DEVICES= to calibrate on the CPU."
            ) from None
        config = _rewired(source, options, found.cut)
        new = {} if config.is_blind else new_tensors(source, config, options.init, found.fitted)
        weight_bytes = write_weights(source, config, new, options, staging, progress)
        shutil.rmtree(work)
        write_config(source, config, staging)
        copy_files(source.checkpoint.folder, staging)
    if figure is not None and found.similarity is not None:
        plot_similarity(found.similarity, config.cut, source.checkpoint.path.name, figure)
    return RewireSummary(
        output=str(output),
        model_type=f"{config.model_type}_swiftkv",
        num_layers=config.num_layers,
        cut=config.cut,
        group_size=config.group_size,
        init="" if config.is_blind else options.init,
        num_anchors=config.num_anchors,
        early_exit=options.early_exit,
        with_teacher=not options.drop_teacher,
        weight_bytes=weight_bytes,
        new_parameters=sum(torch.Size(spec.shape).numel() for spec, _ in new.values()),
        num_tokens=found.num_tokens,
        owners=found.owners,
        states=found.states,
        candidates=found.candidates,
        similarity=() if found.similarity is None else tuple(tuple(row) for row in found.similarity.tolist()),
    )


def _check(source: PlainCheckpoint, options: RewireOptions) -> None:
    if source.config.latent is not None and (options.cut is None or options.init in FITTED_INITS):
        raise KvforgeError(
            f"{source.checkpoint.path} has latent attention, whose K and V are not fitted; give a --cut-layer, and "
            f"--init {', '.join(init for init in INITS if init not in FITTED_INITS)}."
        )
    layers = source.config.num_layers
    if layers < 2:
        raise KvforgeError(f"{source.checkpoint.path} has one layer, and a cut needs two.")
    if options.cut is not None and not 1 <= options.cut < layers:
        raise KvforgeError(f"--cut-layer is {options.cut}; a model of {layers} layers can be cut at 1 to {layers - 1}.")
    if options.group_size > layers:
        raise KvforgeError(f"--group-size is {options.group_size} and the model has {layers} layers; give fewer.")
    _rewired(source, options, options.cut or 1, shares=options.cut is not None)


def _samples(source: PlainCheckpoint, options: RewireOptions, text: Path | None) -> list[list[int]]:
    length = min(options.num_tokens, source.config.max_position)
    vocab_size = source.config.vocab_size
    samples = calibration_samples(source.checkpoint.folder, vocab_size, text, options.num_samples, length)
    if len(samples) < 2:
        raise KvforgeError(f"{text} has one sample of {length} tokens and two are needed; give a longer text.")
    return samples


def _rewired(source: PlainCheckpoint, options: RewireOptions, cut: int, shares: bool = True) -> ModelConfig:
    """The model with a cut; raises KvforgeError where there is none of it, or with ``shares`` where its layers cannot
    share caches so."""
    early_exit = options.early_exit
    try:
        cut_at = dataclasses.replace(source.config, cut=cut, group_size=options.group_size, early_exit=early_exit)
        config = dataclasses.replace(cut_at, num_anchors=options.num_anchors or 0)
        if shares:
            config.check_shared_caches()
    except ModelError as error:
        raise KvforgeError(f"{source.checkpoint.path}: {error}") from None
    return config


def _measure(
    source: PlainCheckpoint,
    options: RewireOptions,
    samples: list[list[int]],
    work: Path,
    plot: bool,
    progress: Progress,
) -> Measurement:
    """Run what calibration is needed, with its files in ``work``, and settle the cut."""
    if options.cut is not None and not samples:
        return Measurement(options.cut)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    search = options.cut is None
    fit_exit = options.early_exit and options.init in FITTED_INITS
    first = 0 if search or plot else options.cut or 0
    inputs = record_inputs(source, samples, work, first, device, progress, with_output=fit_exit)
    similarity = input_similarity(inputs, source.config.num_layers) if search or plot else None
    candidates: list[Candidate] = []
    if options.cut is not None:
        cut = options.cut
    else:
        assert similarity is not None
        candidates = measure_cuts(source, inputs, similarity, options.ridge, device, progress)
        cut = choose_cut(candidates, options.quality_budget)
    owners: list[OwnerFit] = []
    states: list[StateFit] = []
    fitted: Fitted = {}
    if options.init in FITTED_INITS:
        config = _rewired(source, options, cut)
        combine = partial(shared_target, head_dim=config.head_dim) if options.init == "minicache" else mean_target
        owners, fitted = fit_owners(source, config, inputs, options.ridge, device, progress, combine)
        if config.upper_linear:
            states, of_states = fit_states(source, config, inputs, options.ridge, device, progress)
            fitted |= of_states
    if fit_exit:
        fitted |= exit_tensors(source, fit_exit_map(source, inputs, cut, options.ridge, device))
    inputs.remove()
    return Measurement(cut, sum(inputs.lengths), tuple(candidates), similarity, tuple(owners), tuple(states), fitted)
