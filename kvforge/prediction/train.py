"""The training loop of a predictor, resumable: distillation's packing, rates and states around other sums."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from kvforge.distill import world
from kvforge.distill.lock import locked
from kvforge.distill.loop import Progress, SequenceRun, take_steps
from kvforge.distill.packing import Batch, PackedData
from kvforge.distill.trained_parameters import fingerprint
from kvforge.prediction.config import PredictConfig
from kvforge.prediction.predictor import KVPredictor
from kvforge.prediction.trainee import SIZES, SUMS, Trainee, tokens_of
from kvforge.swiftkv import SwiftKVForCausalLM
from model_defs.prediction import MAPS

COLUMNS = ("step", "tokens", "seconds", "lr", "loss", *SUMS, "grad_norm")


@dataclass
class PredictorProgress(Progress):
    """``sizes`` are the base's mean |K|, mean |V| and mean squared scores over step 1, which the errors are relative
    to."""

    sizes: list[float] = field(default_factory=list)


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
        run = _PredictorRun(config, Trainee(base, predictor, config), data, work, device, fit)
        take_steps(run, work, config.loop.checkpoint_every, stop_after, on_step, progress)
        return run.progress


class _PredictorRun(SequenceRun[PredictorProgress]):
    columns = COLUMNS

    def __init__(
        self,
        config: PredictConfig,
        trainee: Trainee,
        data: PackedData,
        work: Path,
        device: torch.device,
        fit: str | None,
    ) -> None:
        base, predictor = trainee.base, trainee.predictor
        identity = config.identity() | {"layers": list(predictor.prediction.layers)}
        source = fingerprint(predictor, False, None if fit is None else f"{MAPS}.")
        identity |= {"teacher": fingerprint(base), "source": source, "fit": fit}
        self.losses, self.trainee = config, trainee.to(device)
        trained: dict[str, nn.Parameter] = {}
        for name, parameter in predictor.named_parameters():
            if is_trained(name, predictor, config.train):
                trained[name] = parameter.requires_grad_(True)
            else:
                parameter.requires_grad_(False)
        super().__init__(config.loop, work, trained, identity, PredictorProgress(), data)
        if not self.progress.sizes:
            self.progress.sizes = self._sizes()

    def _sizes(self) -> list[float]:
        with torch.no_grad():
            batches, _ = self.batches()
            sums = torch.stack([self.trainee(batch, only_sizes=True) for batch in batches]).sum(0)
        count = _count(batches)
        return [float(sums[SUMS.index(name)]) / count or 1.0 for name in SIZES]

    def step(self) -> dict[str, float]:
        """Do one optimizer step; returns its line of the log."""
        started = time.perf_counter()
        batches, weight = self.batches()
        sums, tokens = torch.zeros(len(SUMS), device=self.device), _count(batches)
        for batch in batches:
            part = self.trainee(batch)
            self._loss(part, weight, tokens).backward()
            sums += part.detach()
        row = {"loss": float(self._loss(sums, weight, tokens))}
        for name, value in zip(SUMS, sums.tolist(), strict=True):
            row[name] = value / (tokens if name in SIZES else weight)
        for name, size in zip(SIZES, self.progress.sizes, strict=True):
            row[name] /= size
        row["grad_norm"] = float(nn.utils.clip_grad_norm_(list(self.trained.values()), self.config.clip_norm))
        return self.finish_step(row, started)

    def _loss(self, sums: Tensor, weight: float, tokens: int) -> Tensor:
        k_size, v_size, qk_size = (size * tokens for size in self.progress.sizes)
        factors = (1 / weight, 0.0, *(self.losses.kv_weight / size for size in (k_size, v_size)))
        return (sums * torch.tensor([*factors, self.losses.qk_weight / qk_size], device=sums.device)).sum()


def _count(batches: list[Batch]) -> int:
    return sum(int(tokens_of(batch).sum()) for batch in batches)
