"""The training loop of a predictor, resumable: distillation's packing, rates and states around other sums."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvforge.common.errors import KvforgeError
from kvforge.distill import step_log, world
from kvforge.distill.learning_schedule import learning_rate, share, step_indices
from kvforge.distill.lock import locked
from kvforge.distill.loop import problem_of, take_steps, update
from kvforge.distill.packing import Batch, PackedData
from kvforge.distill.state import STATE_FILE, load_state, restore, save_run
from kvforge.distill.train import make_optimizer
from kvforge.distill.trained_parameters import fingerprint
from kvforge.prediction.config import PredictConfig
from kvforge.prediction.predictor import KVPredictor
from kvforge.prediction.trainee import SIZES, SUMS, Trainee, tokens_of
from kvforge.swiftkv import SwiftKVForCausalLM
from model_defs.prediction import MAPS

COLUMNS = ("step", "tokens", "seconds", "lr", "loss", *SUMS, "grad_norm")


@dataclass
class PredictorProgress:
    """Where a run stands; ``sizes`` are the base's mean |K|, mean |V| and mean squared scores over step 1, which
    the errors are relative to; ``metrics`` is the last line of the log."""

    step: int = 0
    total_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    sizes: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def is_trained(name: str, predictor: KVPredictor, train: str) -> bool:
    """Whether ``--train train`` changes the predictor's parameter of this name: maps, or also the layers that their
    inputs come from."""
    if name.startswith(f"{MAPS}."):
        return True
    last = f"model.layers.{predictor.prediction.num_layers - 1}."
    layers = tuple(f"model.layers.{layer}." for layer in range(predictor.prediction.num_layers - 1))
    return train == "all" and name.startswith(("model.embed_tokens.", f"{last}input_layernorm.", *layers))


def train(
    config: PredictConfig,
    base: SwiftKVForCausalLM,
    predictor: KVPredictor,
    data: PackedData,
    work: Path,
    *,
    fit: str | None = None,
    progress: bool = True,
    stop_after: int | None = None,
    on_step: Callable[[Mapping[str, float]], object] = lambda row: None,
) -> PredictorProgress:
    """Train ``predictor`` in place, in one process; continue the run in ``work`` if there is one.

    ``fit`` says what the maps were fitted to and how; a run then continues over maps whose last bits differ, as those
    of a fit on another number of threads do. Without it they have to be the same.

    ``work`` receives ``state.pt`` every ``checkpoint_every`` steps and at the end, and ``metrics.csv``. The run ends
    after all steps, or after ``stop_after`` in all.

    Raises:
        KvforgeError: the state in ``work`` is of another run, another run works there, a loss or gradient is not
            finite, or the disk is full. The last state stays.
        KeyboardInterrupt: after the step in which SIGINT or SIGTERM came, saved.
    """
    with world.processes(config.loop.device) as device, locked(work):
        if world.size() > 1:
            world.fail("kvforge predict train runs in one process; start it without torchrun.")
        run = _Run(config, Trainee(base, predictor, config), data, work, device, fit)
        take_steps(run, work, config.loop.checkpoint_every, stop_after, on_step, progress)
        return run.progress


class _Run:
    def __init__(
        self,
        config: PredictConfig,
        trainee: Trainee,
        data: PackedData,
        work: Path,
        device: torch.device,
        fit: str | None,
    ) -> None:
        self.config, self.data, self.work, self.device = config, data, work, device
        base, predictor = trainee.base, trainee.predictor
        self.identity: dict[str, Any] = config.identity() | {"layers": list(predictor.prediction.layers)}
        source = fingerprint(predictor, False, None if fit is None else f"{MAPS}.")
        self.identity |= {"data": data.digest, "teacher": fingerprint(base), "source": source, "fit": fit}
        self.trainee = trainee.to(device)
        self.trained: dict[str, nn.Parameter] = {}
        for name, parameter in predictor.named_parameters():
            if is_trained(name, predictor, config.train):
                self.trained[name] = parameter.requires_grad_(True)
            else:
                parameter.requires_grad_(False)
        self.optimizer = make_optimizer(config.loop, self.trained)
        self.order = functools.lru_cache(maxsize=2)(data.epoch_order)
        self.progress = self._resume()
        if not self.progress.sizes:
            self.progress.sizes = self._sizes()

    def _resume(self) -> PredictorProgress:
        state = load_state(self.work / STATE_FILE, self.identity)
        step = state["progress"]["step"] if state else 0
        step_log.cut_after(self.work / step_log.METRICS_FILE, step, COLUMNS)
        if state is not None:
            restore(self.trained, self.optimizer, state, step)
            return PredictorProgress(**state["progress"])
        return PredictorProgress(total_steps=self.config.loop.total_steps(self.data.num_sequences))

    def _batches(self) -> list[Batch]:
        loop, step = self.config.loop, self.progress.step
        indices = step_indices(self.order, loop.seed, self.data.num_sequences, loop.batch_size, step)
        return [self.data.batch(part) for part in share(indices, 0, 1, loop.micro_batch)]

    def _sizes(self) -> list[float]:
        with torch.no_grad():
            batches = self._batches()
            sums = torch.stack([self.trainee(batch, only_sizes=True) for batch in batches]).sum(0)
        count = _count(batches)
        return [float(sums[SUMS.index(name)]) / count or 1.0 for name in SIZES]

    def step(self) -> dict[str, float]:
        """Do one optimizer step; returns its line of the log."""
        started = time.perf_counter()
        config, progress = self.config, self.progress
        batches = self._batches()
        weight = sum(float(batch.weight.sum()) for batch in batches)
        if weight == 0:
            raise KvforgeError(
                f"The sequences of step {progress.step + 1} hold no token with a weight; raise --batch-size, or give "
                "data with answers in every sample."
            )
        sums, tokens = torch.zeros(len(SUMS), device=self.device), _count(batches)
        for batch in batches:
            part = self.trainee(batch)
            self._loss(part, weight, tokens).backward()
            sums += part.detach()
        row = {"loss": float(self._loss(sums, weight, tokens))}
        for name, value in zip(SUMS, sums.tolist(), strict=True):
            row[name] = value / (tokens if name in SIZES else weight)
        for name, size in zip(SIZES, progress.sizes, strict=True):
            row[name] /= size
        row["grad_norm"] = float(nn.utils.clip_grad_norm_(list(self.trained.values()), config.loop.clip_norm))
        problem = problem_of(row, progress.step + 1, self.work)
        if problem is not None:
            raise KvforgeError(problem)
        rate = learning_rate(config.loop, progress.step, progress.total_steps)
        update(self.optimizer, rate)
        progress.step += 1
        progress.tokens += config.loop.batch_size * self.data.length
        progress.seconds += time.perf_counter() - started
        row |= {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds, "lr": rate}
        progress.metrics = row
        step_log.append(self.work / step_log.METRICS_FILE, row, COLUMNS)
        return row

    def _loss(self, sums: Tensor, weight: float, tokens: int) -> Tensor:
        k_size, v_size, qk_size = (size * tokens for size in self.progress.sizes)
        factors = (1 / weight, 0.0, *(self.config.kv_weight / size for size in (k_size, v_size)))
        return (sums * torch.tensor([*factors, self.config.qk_weight / qk_size], device=sums.device)).sum()

    def save(self) -> None:
        """Write the state."""
        save_run(self.work, self.trained, self.optimizer, self.identity, self.progress)


def _count(batches: list[Batch]) -> int:
    return sum(int(tokens_of(batch).sum()) for batch in batches)
