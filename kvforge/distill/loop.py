"""The steps of a resumable run, one after the other, whatever a step trains."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from kvforge.distill.interrupt import noted_interrupt


class Counted(Protocol):
    """Where a run stands."""

    @property
    def step(self) -> int: ...
    @property
    def total_steps(self) -> int: ...


class Run(Protocol):
    """A run, loaded from its last state."""

    @property
    def progress(self) -> Counted: ...
    def step(self) -> dict[str, float]:
        """Do one optimizer step; returns its line of the log, ``loss`` and ``agreement`` among it."""

    def save(self) -> None:
        """Write the state."""


def take_steps(
    run: Run,
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


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the optimizer step once at the learning rate ``rate``, and forget the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
