"""The training loop: parameter-sharing distillation of one model on packed sequences, resumable."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kvforge.common.errors import KvforgeError
from kvforge.distill import step_log, world
from kvforge.distill.config import DistillConfig
from kvforge.distill.distiller import SUMS, Distiller
from kvforge.distill.heap import keep_freed_memory
from kvforge.distill.learning_schedule import learning_rate, share, step_indices
from kvforge.distill.lock import locked
from kvforge.distill.loop import problem_of, take_steps, update
from kvforge.distill.packing import Batch, PackedData
from kvforge.distill.state import STATE_FILE, load_state, restore, save_run
from kvforge.distill.trained_parameters import add_early_exit_head, check_model, fingerprint, has_early_exit, prepare
from kvforge.swiftkv import SwiftKVForCausalLM


@dataclass
class Progress:
    """Where a run stands. ``tokens`` counts positions of sequences, padding included; ``metrics`` is the last line of
    the log; ``hidden_scale`` the mean square of the teacher's states that the hidden error is relative to."""

    step: int = 0
    total_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    hidden_scale: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


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
) -> Progress:
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
            run = _Run(config, model, data, work, device, source)
            show = progress and world.rank() == 0
            take_steps(run, work, config.checkpoint_every, stop_after, on_step, show)
            return run.progress


class _Run:
    def __init__(
        self,
        config: DistillConfig,
        model: SwiftKVForCausalLM,
        data: PackedData,
        work: Path,
        device: torch.device,
        source: str,
    ) -> None:
        self.config, self.data, self.work = config, data, work
        if config.early_exit:
            add_early_exit_head(model)
        self.has_early_exit = has_early_exit(model)
        self.identity: dict[str, Any] = config.identity()
        self.identity |= {"data": data.digest, "teacher": fingerprint(model), "source": source}
        self.distiller = Distiller(model, config)
        prepare(model, config.train, config.dtype)
        if world.size() > 1:
            world.shard(self.distiller, [m for m in (model, self.distiller.copy) if m is not None], device)
        else:
            self.distiller.to(device)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(config, self.trained)
        self.optimizer.zero_grad()  # what a failed step left
        self.order = functools.lru_cache(maxsize=2)(data.epoch_order)
        self.progress = self._resume()
        if self.progress.hidden_scale == 0:
            self.progress.hidden_scale = self._scale()

    def _resume(self) -> Progress:
        state: dict[str, Any] | None = None

        def read() -> dict[str, Any] | None:
            nonlocal state
            state = load_state(self.work / STATE_FILE, self.identity)
            step = state["progress"]["step"] if state else 0
            step_log.cut_after(self.work / step_log.METRICS_FILE, step)
            return state and state["progress"]

        saved = world.first_process(read)
        if saved is not None:
            restore(self.trained, self.optimizer, state, saved["step"])
            return Progress(**saved)
        return Progress(total_steps=self.config.total_steps(self.data.num_sequences))

    @property
    def _device(self) -> torch.device:
        return next(iter(self.trained.values())).device

    def _batches(self) -> tuple[list[Batch], float]:
        """Return this process's micro-batches of the next step, and the sum of the weights of all processes'."""
        config, step = self.config, self.progress.step
        indices = step_indices(self.order, config.seed, self.data.num_sequences, config.batch_size, step)
        parts = share(indices, world.rank(), world.size(), config.micro_batch)
        batches = [self.data.batch(part) for part in parts]
        weight = torch.stack([batch.weight.double().sum() for batch in batches]).sum().to(self._device)
        total = float(world.total(weight))
        if total == 0:
            world.fail(
                f"The sequences of step {step + 1} hold no token with a weight; raise --batch-size, or give data with "
                "answers in every sample."
            )
        return batches, total

    def _scale(self) -> float:
        """Return the weighted mean square of the teacher's states entering the last layer, over the first step."""
        batches, weight = self._batches()
        sums = torch.zeros(4, device=self._device)
        with torch.no_grad():
            for batch in batches:
                sums += self.distiller(batch, only_scale=True)
        return float(world.total(sums)[SUMS.index("hidden")]) / weight or 1.0

    def step(self) -> dict[str, float]:
        """Do one optimizer step; returns its line of the log."""
        started = time.perf_counter()
        config, progress, world_size = self.config, self.progress, world.size()
        batches, weight = self._batches()
        sums = torch.zeros(4, device=self._device)
        factor = torch.tensor([1.0, config.hidden_weight / progress.hidden_scale, 1.0, 0.0], device=self._device)
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
        problem = problem_of(row, progress.step + 1, self.work)  # the same in all processes, as the sums are
        if problem:
            world.fail(problem)
        rate = learning_rate(config, progress.step, progress.total_steps)
        update(self.optimizer, rate)
        progress.step += 1
        progress.tokens += config.batch_size * self.data.length
        progress.seconds += time.perf_counter() - started
        if not self.has_early_exit:
            del row["early_exit_kl"]
        row |= {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds, "lr": rate}
        progress.metrics = row
        world.first_process(lambda: step_log.append(self.work / step_log.METRICS_FILE, row))
        return row

    def _clip(self) -> float:
        """Clip the gradients of the student and of the early-exit head, each by itself, so that the head does not
        change the student; returns the norm of both together."""
        norms = []
        for early in (False, True):
            part = [p for name, p in self.trained.items() if ("_early_exit." in name) == early]
            norm = nn.utils.clip_grad_norm_(part, self.config.clip_norm)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return math.hypot(*(float(norm) for norm in norms))

    def save(self) -> None:
        """Write the state; all processes call this together."""
        save_run(self.work, self.trained, self.optimizer, self.identity, self.progress)


def _check(config: DistillConfig, model: SwiftKVForCausalLM) -> None:
    check_model(model)
    if config.batch_size % world.size():
        raise KvforgeError(
            f"--batch-size {config.batch_size} must be a multiple of the {world.size()} processes; choose another."
        )


def make_optimizer(config: DistillConfig, trained: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only."""
    matrices = [p for p in trained.values() if p.dim() >= 2]
    others: list[Tensor] = [p for p in trained.values() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        fused=True,
    )
