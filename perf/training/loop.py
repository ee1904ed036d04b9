"""The teacher's training loop: stages of growing length, resumable, logged to CSV.

Batches depend on (seed, step) only, so the step number is the whole random state.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from kvforge.distill import step_log
from kvforge.distill.loop import Progress
from kvforge.distill.state import STATE_FILE, save_state
from perf.training.config import Stage, TeacherConfig
from perf.training.documents import TASK_NAMES, Batch, Encode, make_batch

COLUMNS = ("step", "stage", "length", "tokens", "seconds", "lr", "loss", "norm", *TASK_NAMES)


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


class StageRun:
    """A teacher's run, for `kvforge.distill.loop.take_steps`: it continues from the state in `directory`.

    `loss_of(batch)` gives the loss and the predicted ids [B, T]; the batch is on the model's device. Metrics are
    logged every `log_every` steps. `workers` processes make the batches; with 0 this one does.
    """

    def __init__(
        self,
        config: TeacherConfig,
        directory: Path,
        encode: Encode,
        trained: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loss_of: Callable[[Batch], tuple[Tensor, Tensor]],
        workers: int = 0,
    ) -> None:
        self.config, self.trained, self.optimizers, self.loss_of = config, trained, optimizers, loss_of
        self.state, self.log = directory / STATE_FILE, directory / step_log.METRICS_FILE
        self.parameters = list(trained.parameters())
        self.device = self.parameters[0].device
        self.progress = self._resume()
        step_log.cut_after(self.log, self.progress.step, COLUMNS)
        batches = Batches(config, encode)
        self.progress.total_steps = len(batches)
        steps = range(self.progress.step, len(batches))
        self.batches = iter(DataLoader(batches, batch_size=None, sampler=steps, num_workers=workers))

    def _resume(self) -> Progress:
        if not self.state.exists():
            return Progress()
        state = torch.load(self.state, map_location=self.device, weights_only=True)
        self.trained.load_state_dict(state["weights"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return Progress(**state["progress"])

    def save(self) -> None:
        """Writes the state."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"weights": self.trained.state_dict(), "optimizers": optimizers, "progress": asdict(self.progress)}
        save_state(self.state, state)

    def step(self) -> dict[str, float]:
        """Does one step; returns its loss and the mean accuracy of its tasks."""
        started, progress, config = time.perf_counter(), self.progress, self.config
        batch, rate = next(self.batches).to(self.device), learning_rate(config, progress.step)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss, predicted = self.loss_of(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        index, _ = stage_of(config.stages, progress.step)
        progress.step += 1
        progress.tokens += batch.input_ids.numel()
        progress.seconds += time.perf_counter() - started
        accuracy = task_accuracy(predicted, batch)
        if progress.step % config.log_every == 0:
            row = {
                "step": progress.step, "stage": index, "length": batch.input_ids.shape[1], "tokens": progress.tokens,
                "seconds": progress.seconds, "lr": rate, "loss": loss.item(), "norm": norm.item(), **accuracy,
            }  # fmt: skip
            step_log.append(self.log, row, COLUMNS)
        return {"loss": loss.item(), "agreement": sum(accuracy.values()) / len(accuracy)}
