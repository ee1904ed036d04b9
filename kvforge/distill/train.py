"""The training loop: parameter-sharing distillation of one model on packed sequences, resumable."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kvforge.common.errors import KvforgeError
from kvforge.common.heap import keep_freed_memory
from kvforge.distill import world
from kvforge.distill.config import DistillConfig
from kvforge.distill.distiller import SUMS, Distiller
from kvforge.distill.lock import locked
from kvforge.distill.loop import Progress, SequenceRun, take_steps
from kvforge.distill.packing import PackedData
from kvforge.distill.trained_parameters import add_early_exit_head, check_model, fingerprint, has_early_exit, prepare
from kvforge.swiftkv import SwiftKVForCausalLM


@dataclass
class DistillProgress(Progress):
    """``hidden_scale`` is the mean square of the teacher's states that the hidden error is relative to."""

    hidden_scale: float = 0.0


def distill(
    config: DistillConfig,
    model: SwiftKVForCausalLM,
    data: PackedData,
    work: Path,
    *,
    progress: bool = True,
    stop_after: int | None = None,
    on_step: Callable[[Mapping[str, float]], object] = lambda row: None,
    source: str = "",
) -> DistillProgress:
    """Distil ``model``, made with its teacher, in place; continue the run in ``work`` if there is one.

    ``work`` receives ``state.pt`` every ``checkpoint_every`` steps and at the end, and ``metrics.csv``. The run ends
    after all steps, or after ``stop_after`` in all; ``on_step`` is called with every line of the log, before the step
    is part of a saved state, so that an interrupted and continued run leaves none out. ``source`` says where the model
    is from: a run is continued only with the same one. Afterwards the trained weights are fp32, and the others as they
    were but for ``dtype`` ``fp32``; with several processes all are sharded.

    Raises:
        KvforgeError: the model has no cut or no teacher, the state in ``work`` is of another run, another run works
            there, a loss or gradient is not finite, or the disk is full. The last state stays.
        KeyboardInterrupt: after the step in which SIGINT or SIGTERM came (one process, main thread), saved.
    """
    with world.processes(config.device) as device:
        world.first_process(lambda: _check(config, model))
        if device.type == "cpu":
            keep_freed_memory()
        with locked(work):
            run = _Distillation(config, model, data, work, device, source)
            show = progress and world.rank() == 0
            take_steps(run, work, config.checkpoint_every, stop_after, on_step, show)
            return run.progress


class _Distillation(SequenceRun[DistillProgress]):
    def __init__(
        self,
        config: DistillConfig,
        model: SwiftKVForCausalLM,
        data: PackedData,
        work: Path,
        device: torch.device,
        source: str,
    ) -> None:
        if config.early_exit:
            add_early_exit_head(model)
        self.has_early_exit = has_early_exit(model)
        identity = config.identity() | {"teacher": fingerprint(model), "source": source}
        self.distiller = Distiller(model, config)
        prepare(model, config.train, config.dtype)
        if world.size() > 1:
            world.shard(self.distiller, [m for m in (model, self.distiller.copy) if m is not None], device)
        else:
            self.distiller.to(device)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        super().__init__(config, work, trained, identity, DistillProgress(), data)
        if self.progress.hidden_scale == 0:
            self.progress.hidden_scale = self._scale()

    def _scale(self) -> float:
        """Return the weighted mean square of the teacher's states entering the last layer, over the first step."""
        batches, weight = self.batches()
        sums = torch.zeros(4, device=self.device)
        with torch.no_grad():
            for batch in batches:
                sums += self.distiller(batch, only_scale=True)
        return float(world.total(sums)[SUMS.index("hidden")]) / weight or 1.0

    def step(self) -> dict[str, float]:
        """Do one optimizer step; returns its line of the log."""
        started = time.perf_counter()
        config, progress, world_size = self.config, self.progress, world.size()
        batches, weight = self.batches()
        sums = torch.zeros(4, device=self.device)
        factor = torch.tensor([1.0, config.hidden_weight / progress.hidden_scale, 1.0, 0.0], device=self.device)
        for batch in batches:
            part = self.distiller(batch)
            loss = (part * factor).sum() / weight
            (loss * world_size).backward()  # FSDP averages gradients over the processes
            sums += part.detach()
        norm = self._clip()
        sums = world.total(sums) / weight
        values = dict(zip(SUMS, sums.tolist(), strict=True))
        row = {"loss": float((sums * factor).sum()), "grad_norm": norm, **values}
        row["hidden"] /= progress.hidden_scale
        if not self.has_early_exit:
            del row["early_exit_kl"]
        return self.finish_step(row, started)

    def _clip(self) -> float:
        """Clip the gradients of the student and of the early-exit head, each by itself, so that the head does not
        change the student; returns the norm of both together."""
        norms = []
        for early in (False, True):
            part = [p for name, p in self.trained.items() if ("_early_exit." in name) == early]
            norm = nn.utils.clip_grad_norm_(part, self.config.clip_norm)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return math.hypot(*(float(norm) for norm in norms))


def _check(config: DistillConfig, model: SwiftKVForCausalLM) -> None:
    check_model(model)
    if config.batch_size % world.size():
        raise KvforgeError(
            f"--batch-size {config.batch_size} must be a multiple of the {world.size()} processes; choose another."
        )
