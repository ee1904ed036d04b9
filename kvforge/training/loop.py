"""The training loop both models share: stages of growing length, resumable, logged to CSV.

Batches depend on (seed, step) only, so the step number is the whole random state.
"""

import csv
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvforge.distill.state import save_state
from kvforge.training.config import Stage
from kvforge.training.documents import TASK_NAMES, Batch, Encode, make_batch

AVERAGE = 0.95
NEEDLE = TASK_NAMES.index("needle_single")


@dataclass
class Progress:
    """Where a run stands. `accuracy` is the running average of the current stage, 0 at its start."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    accuracy: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


def learning_rate(progress: Progress, stages: Sequence[Stage], lr: float, warmup_steps: int) -> float:
    """Warm-up over the first steps, times what the present stage asks for."""
    stage = stages[progress.stage]
    scale = 1.0 - (1.0 - stage.lr_end) * progress.stage_step / stage.max_steps
    return lr * stage.lr_scale * scale * min(1.0, (progress.step + 1) / warmup_steps)


def task_accuracy(predicted: Tensor, batch: Batch) -> dict[str, float]:
    """Teacher-forced accuracy on answer tokens, per task present in the batch. `predicted` [B, T] int64."""
    correct = predicted == batch.targets
    result = {}
    for index, name in enumerate(TASK_NAMES):
        chosen = batch.task == index
        if chosen.any():
            result[name] = correct[chosen].float().mean().item()
    return result


def advance(progress: Progress, stage: Stage, accuracy: float | None, seconds: float) -> None:
    """Counts one finished step, and moves to the next stage when this one is done."""
    if accuracy is not None:
        weight = min(AVERAGE, progress.stage_step / (progress.stage_step + 1))
        progress.accuracy = weight * progress.accuracy + (1 - weight) * accuracy
    progress.step += 1
    progress.stage_step += 1
    progress.tokens += stage.length * stage.sequences
    progress.seconds += seconds
    reached = progress.accuracy >= stage.target and progress.stage_step >= stage.min_steps
    if reached or progress.stage_step >= stage.max_steps:
        progress.stage, progress.stage_step, progress.accuracy = progress.stage + 1, 0, 0.0


def drop_rows_after(path: Path, step: int) -> None:
    """Removes the metrics of steps that an interrupted run did after its last checkpoint."""
    if not path.exists():
        return
    header, *rows = path.read_text().splitlines(keepends=True)
    kept = [row for row in rows if row.endswith("\n") and int(row.split(",", 1)[0]) <= step]
    if len(kept) < len(rows):
        path.write_text("".join([header, *kept]))


def run_stages(
    *,
    directory: Path,
    stages: Sequence[Stage],
    seed: int,
    lr: float,
    warmup_steps: int,
    clip_norm: float,
    checkpoint_every: int,
    encode: Encode,
    trained: nn.Module,
    parameters: Iterable[nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[Batch], tuple[Tensor, Tensor]],
    stop_after: int | None = None,
) -> Progress:
    """Trains until the stages end, or until `stop_after` steps in all; continues from `directory/state.pt`.

    `loss_of(batch)` gives the loss and the predicted ids [B, T]. The state is written every
    `checkpoint_every` steps, at every change of stage and at the end. Metrics go to `directory/metrics.csv`.
    """
    parameters = list(parameters)
    progress = Progress()
    if (directory / "state.pt").exists():
        state = torch.load(directory / "state.pt", map_location="cpu", weights_only=True)
        trained.load_state_dict(state["weights"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = Progress(**state["progress"])

    def save() -> None:
        save_state(
            directory / "state.pt",
            {
                "weights": trained.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "progress": vars(progress),
            },
        )

    directory.mkdir(parents=True, exist_ok=True)
    drop_rows_after(directory / "metrics.csv", progress.step)
    bar = tqdm(initial=progress.step, total=sum(stage.max_steps for stage in stages), mininterval=5, unit="step")
    columns = ["step", "stage", "length", "tokens", "seconds", "lr", "loss", "norm", *TASK_NAMES]
    with (directory / "metrics.csv").open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if file.tell() == 0:
            writer.writeheader()
        while progress.stage < len(stages) and (stop_after is None or progress.step < stop_after):
            started = time.perf_counter()
            stage, stage_index = stages[progress.stage], progress.stage
            batch = make_batch(f"{seed}/{progress.step}", stage, encode)
            rate = learning_rate(progress, stages, lr, warmup_steps)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
                for group in optimizer.param_groups:
                    group["lr"] = rate
            loss, predicted = loss_of(batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            accuracy = task_accuracy(predicted, batch)
            advance(progress, stage, accuracy.get(TASK_NAMES[NEEDLE]), time.perf_counter() - started)
            row = {
                "step": progress.step,
                "stage": stage_index,
                "length": stage.length,
                "tokens": progress.tokens,
                "seconds": round(progress.seconds, 1),
                "lr": f"{rate:.2e}",
                "loss": round(loss.item(), 4),
                "norm": round(norm.item(), 3),
            }
            writer.writerow({**row, **{name: round(value, 4) for name, value in accuracy.items()}})
            file.flush()
            bar.update()
            bar.set_postfix(length=stage.length, loss=row["loss"], needle=round(progress.accuracy, 3), refresh=False)
            if progress.step % checkpoint_every == 0 or progress.stage != stage_index:
                save()
    bar.close()
    save()
    return progress
