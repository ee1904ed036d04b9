"""A resumable run that trains: its state, log and optimizer, and its steps one after the other."""

import functools
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvforge.distill import step_log, world
from kvforge.distill.config import DistillConfig
from kvforge.distill.data import DataReport
from kvforge.distill.interrupt import noted_interrupt
from kvforge.distill.learning_schedule import learning_rate, share, step_indices
from kvforge.distill.packing import Batch, PackedData
from kvforge.distill.state import STATE_FILE, load_state, restore, save_run


@dataclass
class Progress:
    """Where a run stands. ``tokens`` counts positions of sequences, padding included; ``metrics`` is the last line of
    the log."""

    step: int = 0
    total_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


Summary = TypeVar("Summary", bound="RunSummary")


@dataclass(frozen=True)
class RunSummary:
    """What was written: ``output``, and in ``work`` the log of a run. ``metrics`` is the last step's line of it."""

    output: str
    work: str
    steps: int
    tokens: int
    seconds: float
    metrics: dict[str, float]
    data: DataReport

    @classmethod
    def of(cls: type[Summary], output: Path, work: Path, run: Progress, data: DataReport, **own: Any) -> Summary:
        """Return that of a run that has ended, with the fields of a subclass."""
        return cls(str(output), str(work), run.step, run.tokens, run.seconds, run.metrics, data, **own)


Standing = TypeVar("Standing", bound=Progress)


class Run(ABC, Generic[Standing]):
    """What all runs have, whatever a step trains: ``trained`` parameters, and in ``work`` a state and a log with
    ``columns``. It continues from the state there, which has to be of the same ``identity``, or begins with ``new``. A
    step has ``step_tokens``. All processes call its methods together.

    Raises:
        KvforgeError: the state in ``work`` is of another run or cannot be read, or the log cannot be written.
    """

    columns: Sequence[str] = step_log.COLUMNS

    def __init__(
        self,
        config: DistillConfig,
        work: Path,
        trained: Mapping[str, nn.Parameter],
        identity: Mapping[str, Any],
        new: Standing,
        step_tokens: int,
    ) -> None:
        self.config, self.work, self.trained, self.identity = config, work, trained, identity
        self.step_tokens = step_tokens
        self.optimizer = make_optimizer(config, trained)
        self.optimizer.zero_grad()  # what a failed step left
        self.progress = self._resume(new)

    def _resume(self, new: Standing) -> Standing:
        state: dict[str, Any] | None = None

        def read() -> dict[str, Any] | None:
            nonlocal state
            state = load_state(self.work / STATE_FILE, self.identity)
            step = state["progress"]["step"] if state else 0
            step_log.cut_after(self.work / step_log.METRICS_FILE, step, self.columns)
            return state and state["progress"]

        saved = world.first_process(read)
        if saved is None:
            return new
        restore(self.trained, self.optimizer, state, saved["step"])
        return type(new)(**saved)

    @abstractmethod
    def step(self) -> dict[str, float]:
        """Do one optimizer step; returns its line of the log, ``loss`` and ``agreement`` among it."""

    def finish_step(self, row: dict[str, float], started: float) -> dict[str, float]:
        """Let the optimizer step with the gradients of a step that began at ``started`` (``time.perf_counter``) and
        found ``row``, the same in all processes. Returns its line of the log.

        Raises:
            KvforgeError: the loss or the gradient is not finite, or the log cannot be written.
        """
        config, progress = self.config, self.progress
        problem = problem_of(row, progress.step + 1, self.work)
        if problem is not None:
            world.fail(problem)
        rate = learning_rate(config, progress.step, progress.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.step += 1
        progress.tokens += self.step_tokens
        progress.seconds += time.perf_counter() - started
        row = row | {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds, "lr": rate}
        progress.metrics = row
        world.first_process(lambda: step_log.append(self.work / step_log.METRICS_FILE, row, self.columns))
        return row

    def save(self) -> None:
        """Write the state."""
        save_run(self.work, self.trained, self.optimizer, self.identity, self.progress)


class SequenceRun(Run[Standing]):
    """A run over the packed sequences of ``data``, of which ``new`` need not say the number of steps."""

    def __init__(
        self,
        config: DistillConfig,
        work: Path,
        trained: Mapping[str, nn.Parameter],
        identity: Mapping[str, Any],
        new: Standing,
        data: PackedData,
    ) -> None:
        self.data, self.order = data, functools.lru_cache(maxsize=2)(data.epoch_order)
        new.total_steps = config.total_steps(data.num_sequences)
        super().__init__(config, work, trained, {**identity, "data": data.digest}, new, config.batch_size * data.length)

    @property
    def device(self) -> torch.device:
        return next(iter(self.trained.values())).device

    def batches(self) -> tuple[list[Batch], float]:
        """Return this process's micro-batches of the next step, and the sum of the weights of all processes'."""
        config, step = self.config, self.progress.step
        indices = step_indices(self.order, config.seed, self.data.num_sequences, config.batch_size, step)
        parts = share(indices, world.rank(), world.size(), config.micro_batch)
        batches = [self.data.batch(part) for part in parts]
        weight = torch.stack([batch.weight.double().sum() for batch in batches]).sum().to(self.device)
        total = float(world.total(weight))
        if total == 0:
            world.fail(
                f"The sequences of step {step + 1} hold no token with a weight; raise --batch-size, or give data with "
                "answers in every sample."
            )
        return batches, total


def take_steps(
    run: Run[Any],
    work: Path,
    checkpoint_every: int,
    stop_after: int | None,
    on_step: Callable[[Mapping[str, float]], object],
    show_progress: bool,
) -> None:
    """Do what is left of the steps, or of the first ``stop_after``, with a state in ``work`` every ``checkpoint_every``
    steps and at the end. ``on_step`` is called with every line of the log, before the step is part of a state.

    Raises:
        KeyboardInterrupt: after the step in which SIGINT or SIGTERM came (one process, main thread), saved.
    """
    total = run.progress.total_steps
    last = total if stop_after is None else min(stop_after, total)
    bar = tqdm(
        initial=run.progress.step,
        total=total,
        unit="step",
        mininterval=2 if sys.stderr.isatty() else 60,
        disable=not show_progress,
    )
    with bar, noted_interrupt() as interrupted:
        while run.progress.step < last:
            row = run.step()
            bar.update()
            bar.set_postfix(loss=f"{row['loss']:.4g}", agreement=f"{row['agreement']:.3f}", refresh=False)
            stop = interrupted()
            on_step(row)
            if stop or run.progress.step % checkpoint_every == 0 or run.progress.step == last:
                run.save()
            if stop and run.progress.step < last:
                note = f"kvforge: step {run.progress.step} is saved in {work}; the same command continues"
                bar.write(note, file=sys.stderr)
                raise KeyboardInterrupt


def problem_of(row: Mapping[str, float], step: int, work: Path) -> str | None:
    """Return a sentence where ``loss`` or ``grad_norm`` of a step, counted from 1, is not finite."""
    for name, what in (("loss", "loss"), ("grad_norm", "gradient")):
        if not math.isfinite(row[name]):
            return (
                f"The {what} of step {step} is {row[name]}; nothing of this step is kept, and "
                f"{work} holds the last good state, if one was saved: lower --lr or --clip-norm in another "
                "--work, or check the data and the model's weights."
            )
    return None


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
