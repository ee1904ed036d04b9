"""`kvforge distill` as a function: from a rewired checkpoint and data to a distilled checkpoint."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.model import check_is_rewired, check_weights, open_model, read_model_config
from kvforge.checkpoint.output import check_output, work_folder
from kvforge.common.dtypes import COMPUTE_DTYPES
from kvforge.common.errors import CheckpointError, KvforgeError, MissingToolError
from kvforge.distill import world
from kvforge.distill.config import DistillConfig
from kvforge.distill.data import load_data
from kvforge.distill.export import export_checkpoint
from kvforge.distill.loop import RunSummary
from kvforge.distill.packing import DataSettings
from kvforge.distill.plot import plot_metrics
from kvforge.distill.step_log import METRICS_FILE
from kvforge.distill.train import distill
from kvforge.distill.trained_parameters import fingerprint, is_trained
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from model_defs import ModelConfig, ModelError
from model_defs.weights import is_teacher_only

PLOT_FILE = "metrics.svg"


@dataclass(frozen=True)
class DistillSummary(RunSummary):
    """The checkpoint ``output``; ``work`` has the ``plot`` of the log, too (None without matplotlib)."""

    plot: str | None


def distill_checkpoint(
    src: str | Path,
    dst: str | Path,
    data: str | Path,
    config: DistillConfig,
    settings: DataSettings | None = None,
    *,
    work: str | Path | None = None,
    keep_teacher: bool = False,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> DistillSummary:
    """Distil the rewired checkpoint ``src`` on ``data`` (see ``load_data``) and write the student to ``dst``.

    A run that was interrupted continues from ``work`` (by default ``dst`` and ``.training``), which is left
    there with the log; ``overwrite`` replaces a checkpoint at ``dst``, never a run. ``settings`` is by default
    ``config.length`` with all tokens as targets; sequences are at most as long as the model's positions. ``dtype``
    is that of the written weights, by default the source's.

    Raises:
        CheckpointError: ``src`` has no cut or not its teacher's projections, or cannot be read.
        KvforgeError: ``dst`` may not be written (``check_output``), ``work`` is in it or is ``src``, the data is
            unusable, or see ``distill``.
    """
    src, dst = Path(src), Path(dst)
    if keep_teacher and config.train != "partial":
        raise KvforgeError(
            f"--train {config.train} changes weights that the teacher needs as they were; leave out --keep-teacher."
        )

    def begin() -> tuple[Path, Checkpoint, ModelConfig]:
        check_output(dst, [src, Path(data)], overwrite)
        folder = work_folder(work, dst, [src])
        checkpoint, sizes = _open(src)
        if sizes.is_blind:
            _check_blind(src, sizes, config, settings, keep_teacher)
        if config.early_exit:
            try:
                dataclasses.replace(sizes, early_exit=True)
            except ModelError as error:
                raise KvforgeError(f"--early-exit does not go with {src}: {error}") from None
        return folder, checkpoint, sizes

    with world.processes(config.device):
        folder, checkpoint, sizes = world.first_process(begin)
        settings = settings or DataSettings(config.length)
        settings = dataclasses.replace(settings, length=min(settings.length, sizes.max_position))
        config = dataclasses.replace(config, length=settings.length)
        show = progress and sys.stderr.isatty()
        packed, report = world.first_process(lambda: load_data(data, src, sizes.vocab_size, settings, show))
        model = _load(checkpoint, sizes, config.dtype)
        source = fingerprint(model, only_teacher=False)
        state = distill(config, model, packed, folder, progress=progress, source=source)
        trained = {name: world.gathered(p) for name, p in model.named_parameters() if p.requires_grad}
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        keep_all = keep_teacher or sizes.is_blind

        def finish() -> DistillSummary:
            plot: str | None = str(folder / PLOT_FILE)
            try:
                plot_metrics(folder / METRICS_FILE, folder / PLOT_FILE)
            except MissingToolError:
                plot = None
            # Last, so that whatever fails, the same command can be given again.
            check_output(dst, [checkpoint.path], overwrite)  # another thing may have come there while the run went on
            export_checkpoint(
                checkpoint, dst, shapes, trained, sizes.cut, keep_teacher=keep_all, dtype=dtype, overwrite=overwrite
            )
            return DistillSummary.of(dst, folder, state, report, plot=plot)

        return world.first_process(finish)


def _open(src: Path) -> tuple[Checkpoint, ModelConfig]:
    checkpoint = open_model(src)
    check_is_rewired(checkpoint)
    if checkpoint.quantization is not None:
        raise CheckpointError(f"{src} is quantized ({checkpoint.quantization}); distil the original and quantize that.")
    sizes = read_model_config(checkpoint)
    if not (sizes.is_swiftkv or sizes.is_blind):
        raise CheckpointError(f"{src} has no SwiftKV layers to distil; give it a cut with kvforge rewire first.")
    check_weights(checkpoint, sizes)
    with torch.device("meta"):
        names = SwiftKVForCausalLM(sizes, with_teacher=True).state_dict()
    missing = [n for n in names if is_teacher_only(n, sizes.cut) and n not in checkpoint.file_of_tensor]
    if missing:
        raise CheckpointError(
            f"{src} has no {missing[0]}: the teacher's projections were dropped; kvforge rewire keeps them, and "
            "kvforge distill does with --keep-teacher."
        )
    return checkpoint, sizes


def _check_blind(
    src: Path, sizes: ModelConfig, config: DistillConfig, settings: DataSettings | None, keep_teacher: bool
) -> None:
    """Raise KvforgeError for what a model with a blind cut is not distilled with."""
    if settings is None or settings.mask != "answers":
        raise KvforgeError(f"{src} has a blind cut, which hides prompts; say which tokens are answers: --mask answers.")
    if keep_teacher:
        raise KvforgeError(
            f"{src} has a blind cut, so that the student's projections are in the teacher's place; "
            "leave out --keep-teacher."
        )
    if config.early_exit:
        raise KvforgeError(f"{src} has a blind cut, which goes with no early exit; leave out --early-exit.")
    if sizes.group_size > 1:
        raise KvforgeError(f"{src} has a blind cut and groups, which are not distilled; rewire with --group-size 1.")


def _load(checkpoint: Checkpoint, sizes: ModelConfig, dtype: str) -> SwiftKVForCausalLM:
    """Return the model; what distillation adds is read in fp32 under bf16 too, as it is kept."""
    precision = COMPUTE_DTYPES[dtype]
    model = load_model(checkpoint, sizes, precision, with_teacher=True)
    for name, parameter in model.named_parameters():
        if is_trained(name, sizes.cut, "partial", sizes.is_blind):
            parameter.data = checkpoint.read(name, tuple(parameter.shape), torch.float32)
    return model
