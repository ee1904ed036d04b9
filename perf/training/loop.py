"""The teacher's training loop: stages of growing length, resumable, logged to CSV.

Batches depend on (seed, step) only, so the step number is the whole random state.
"""

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from kvforge.distill.state import save_state
from perf.training.config import Stage, TeacherConfig
from perf.training.documents import TASK_NAMES, Batch, Encode, make_batch


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Batches(Dataset[Batch]):
    """The batch of each step."""

    def __init__(self, config: TeacherConfig, encode: Encode) -> None:
        self.config, self.encode = config, encode

    def __len__(self) -> int:
        return sum(stage.max_steps for stage in self.config.stages)

    def __getitem__(self, step: int) -> Batch:
        stage = self.config.stages[stage_of(self.config.stages, step)[0]]
        return make_batch(f"{self.config.seed}/{step}", stage, self.encode)


def stage_of(stages: Sequence[Stage], step: int) -> tuple[int, int]:
    """The stage that a step (from 0) is in, and its number there."""
    for index, stage in enumerate(stages):
        if step < stage.max_steps:
            return index, step
        step -= stage.max_steps
    raise ValueError("the step is beyond the last stage")


def learning_rate(config: TeacherConfig, step: int) -> float:
    """Warm-up over the first steps, times the fall within the present stage."""
    index, within = stage_of(config.stages, step)
    stage = config.stages[index]
    scale = 1.0 - (1.0 - stage.lr_end) * within / stage.max_steps
    return config.lr * scale * min(1.0, (step + 1) / config.warmup_steps)


def task_accuracy(predicted: Tensor, batch: Batch) -> dict[str, float]:
    """Teacher-forced accuracy on answer tokens, per task present in the batch. `predicted` [B, T] int64."""
    correct = predicted == batch.targets
    result = {}
    for index, name in enumerate(TASK_NAMES):
        chosen = batch.task == index
        if chosen.any():
            result[name] = correct[chosen].float().mean().item()
    return result


def drop_rows_after(path: Path, step: int) -> None:
    """Removes the metrics of steps that an interrupted run did after its last checkpoint."""
    if not path.exists():
        return
    header, *rows = path.read_text().splitlines(keepends=True)
    kept = [row for row in rows if row.endswith("\n") and int(row.split(",", 1)[0]) <= step]
    if len(kept) < len(rows):
        path.write_text("".join([header, *kept]))


def run_stages(
    config: TeacherConfig,
    directory: Path,
    encode: Encode,
    trained: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[Batch], tuple[Tensor, Tensor]],
    workers: int = 0,
    stop_after: int | None = None,
) -> Progress:
    """Trains until the stages end, or until `stop_after` steps in all; continues from `directory/state.pt`.

    `loss_of(batch)` gives the loss and the predicted ids [B, T]; the batch is on the model's device. The state is
    written every `checkpoint_every` steps and at the end. Metrics go to `directory/metrics.csv` every `log_every`
    steps. `workers` processes make the batches; with 0 this one does.
    """
    parameters = list(trained.parameters())
    device = parameters[0].device
    progress = Progress()
    if (directory / "state.pt").exists():
        state = torch.load(directory / "state.pt", map_location=device, weights_only=True)
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
                "progress": asdict(progress),
            },
        )

    directory.mkdir(parents=True, exist_ok=True)
    drop_rows_after(directory / "metrics.csv", progress.step)
    batches = Batches(config, encode)
    steps = range(progress.step, len(batches) if stop_after is None else min(stop_after, len(batches)))
    loader = DataLoader(batches, batch_size=None, sampler=steps, num_workers=workers)
    bar = tqdm(initial=progress.step, total=len(batches), mininterval=5, unit="step")
    columns = ["step", "stage", "length", "tokens", "seconds", "lr", "loss", "norm", *TASK_NAMES]
    with (directory / "metrics.csv").open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if file.tell() == 0:
            writer.writeheader()
        started = time.perf_counter()
        for step, made in zip(steps, loader, strict=True):
            batch = made.to(device)
            rate = learning_rate(config, step)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
                for group in optimizer.param_groups:
                    group["lr"] = rate
            loss, predicted = loss_of(batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, config.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            index, _ = stage_of(config.stages, step)
            progress.step += 1
            progress.tokens += batch.input_ids.numel()
            now = time.perf_counter()
            progress.seconds, started = progress.seconds + now - started, now
            bar.update()
            if progress.step % config.log_every == 0:
                row = {
                    "step": progress.step, "stage": index, "length": batch.input_ids.shape[1],
                    "tokens": progress.tokens, "seconds": round(progress.seconds, 1), "lr": f"{rate:.2e}",
                    "loss": round(loss.item(), 4), "norm": round(norm.item(), 3),
                }  # fmt: skip
                accuracy = task_accuracy(predicted, batch)
                writer.writerow({**row, **{name: round(value, 4) for name, value in accuracy.items()}})
                file.flush()
                bar.set_postfix(length=row["length"], loss=row["loss"], refresh=False)
            if progress.step % config.checkpoint_every == 0:
                save()
    bar.close()
    save()
    return progress
