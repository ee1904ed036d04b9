"""The training loop of a draft head, resumable: distillation's packing, rates and states around other sums."""

import dataclasses
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
from kvforge.distill.config import DistillConfig
from kvforge.distill.draft_module import DraftModule, down
from kvforge.distill.learning_schedule import learning_rate, share, step_indices
from kvforge.distill.lock import locked
from kvforge.distill.loop import problem_of, take_steps, update
from kvforge.distill.loss import divergence
from kvforge.distill.packing import Batch, PackedData
from kvforge.distill.state import STATE_FILE, load_state, restore, save_run
from kvforge.distill.train import make_optimizer
from kvforge.distill.trained_parameters import fingerprint
from kvforge.swiftkv import Layout, SwiftKVForCausalLM, make_layout
from model_defs.draft_head import DraftHead

NUM_PASSES = 4
"""Drafts behind one another that a head is trained to give."""
DECAY = 0.8
"""What a pass counts beside the one before it."""
COLUMNS = ("step", "tokens", "seconds", "lr", "loss", "agreement", "last_agreement", "grad_norm")
SUMS = ("loss", "agreement", "weight", "last_agreement", "last_weight")


@dataclass
class DraftProgress:
    """Where a run stands; ``metrics`` is the last line of the log."""

    step: int = 0
    total_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class DraftTrainee(nn.Module):
    """A frozen target and the head that learns to draft for it, in float32 but for autocast."""

    def __init__(
        self, target: SwiftKVForCausalLM, module: DraftModule, head: DraftHead, token_of: Tensor, config: DistillConfig
    ) -> None:
        super().__init__()
        self.target, self.module = target.requires_grad_(False), module
        self.head, self.config = head, config
        self.register_buffer("token_of", token_of.long())
        self.register_buffer("is_known", torch.zeros(head.model.vocab_size, dtype=torch.bool))
        self.is_known[self.token_of] = True

    def forward(self, batch: Batch) -> Tensor:
        """Return fp32 ``[5]``, the sums named in SUMS, of which the loss is T^2 KL(target || head) over the head's
        tokens, where the target's most probable one is among these; agreements are of the first and the last pass."""
        device = self.token_of.device
        ids, segments, weight = (each.to(device) for each in (batch.input_ids, batch.segments, batch.weight))
        behind, target = _up(ids), self.target
        layout = make_layout(target.sizes, ids.shape[1], segments, device)
        own = make_layout(self.head.model, ids.shape[1], segments, device)
        mask = own.masks[0]
        assert mask is not None
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            states, output = self._states(ids, layout)
            rotation = own.rotations[self.head.model.rope]
            embedded = target.model.embed_tokens(behind)
            passes = self.module(states, embedded, rotation, mask, NUM_PASSES)
            is_next = _up(segments) == segments
            is_next[:, -1] = False
            wanted, sums = _up(output), torch.zeros(len(SUMS), device=device)
            for number, hidden in enumerate(passes):
                begins_here = down(segments + 1, number, dim=1) == segments + 1
                of_row = _up(weight) * (is_next & begins_here)
                chosen = of_row > 0
                sums = sums + self._sums(hidden[chosen], wanted[chosen], of_row[chosen], number)
        return sums

    def _sums(self, hidden: Tensor, output: Tensor, weight: Tensor, number: int) -> Tensor:
        logits, wanted = self.module.lm_head(self.module.norm(hidden)).float(), self.target.head(output).float()
        best = wanted.argmax(-1)
        of_known = weight * self.is_known[best]
        divergences = divergence(logits, wanted[:, self.token_of], self.config.temperature)
        loss = DECAY**number * (divergences * of_known).sum()
        agreement = ((self.token_of[logits.detach().argmax(-1)] == best) * weight).sum()
        nothing = torch.zeros_like(loss)
        first = (agreement, weight.sum()) if number == 0 else (nothing, nothing)
        last = (agreement, weight.sum()) if number == NUM_PASSES - 1 else (nothing, nothing)
        return torch.stack((loss, *first, *last))

    @torch.no_grad()
    def _states(self, ids: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return ``[B, T, 3 hidden]``, the streams that the head reads, and the target's normalised output."""
        model, streams = self.target.model, dict[int, Tensor]()
        handles = [
            model.layers[layer].register_forward_pre_hook(
                lambda _, given, layer=layer: streams.__setitem__(layer, given[0])
            )
            for layer in set(self.head.layers)
        ]
        try:
            output, _ = model.upper(model.lower(ids, layout), layout)
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([streams[layer] for layer in self.head.layers], dim=-1), output


def _up(x: Tensor) -> Tensor:
    """Return ``x`` ``[B, T, …]`` one place nearer the beginning; the last place keeps what it has."""
    return torch.cat((x[:, 1:], x[:, -1:]), dim=1)


def train_head(
    trainee: DraftTrainee,
    data: PackedData,
    work: Path,
    *,
    progress: bool = True,
    stop_after: int | None = None,
    on_step: Callable[[Mapping[str, float]], object] = lambda row: None,
) -> DraftProgress:
    """Train ``trainee.module`` in place, in one process; continue the run in ``work`` if there is one, as ``distill``.

    Raises:
        KvforgeError: the state in ``work`` is of another run, another run works there, a loss or gradient is not
            finite, or the disk is full. The last state stays.
        KeyboardInterrupt: after the step in which SIGINT or SIGTERM came, saved.
    """
    config = trainee.config
    with world.processes(config.device) as device, locked(work):
        if world.size() > 1:
            world.fail("--draft-head trains in one process; start it without torchrun.")
        run = _HeadRun(trainee.to(device), data, work)
        take_steps(run, work, config.checkpoint_every, stop_after, on_step, progress)
        return run.progress


class _HeadRun:
    def __init__(self, trainee: DraftTrainee, data: PackedData, work: Path) -> None:
        self.trainee, self.data, self.work, self.config = trainee, data, work, trainee.config
        head = dataclasses.asdict(trainee.head)
        self.identity: dict[str, Any] = self.config.identity() | {"head": head, "tokens": trainee.token_of.tolist()}
        self.identity |= {"data": data.digest, "teacher": fingerprint(trainee.target, only_teacher=False)}
        self.trained = dict(trainee.module.named_parameters())
        self.optimizer = make_optimizer(self.config, self.trained)
        self.order = functools.lru_cache(maxsize=2)(data.epoch_order)
        state = load_state(work / STATE_FILE, self.identity)
        step = state["progress"]["step"] if state else 0
        step_log.cut_after(work / step_log.METRICS_FILE, step, COLUMNS)
        self.progress = DraftProgress(total_steps=self.config.total_steps(data.num_sequences))
        if state is not None:
            restore(self.trained, self.optimizer, state, step)
            self.progress = DraftProgress(**state["progress"])

    def step(self) -> dict[str, float]:
        """Do one optimizer step; returns its line of the log."""
        started = time.perf_counter()
        config, progress = self.config, self.progress
        indices = step_indices(self.order, config.seed, self.data.num_sequences, config.batch_size, progress.step)
        batches = [self.data.batch(part) for part in share(indices, 0, 1, config.micro_batch)]
        total = sum(float(batch.weight.sum()) for batch in batches)
        if total == 0:
            raise KvforgeError(
                f"The sequences of step {progress.step + 1} hold no token with a weight; raise --batch-size, or give "
                "data with answers in every sample."
            )
        sums = torch.zeros(len(SUMS), device=self.trainee.token_of.device)
        for batch in batches:
            part = self.trainee(batch)
            (part[0] / total).backward()
            sums += part.detach()
        values = dict(zip(SUMS, sums.tolist(), strict=True))
        row = {
            "loss": values["loss"] / total,
            "agreement": values["agreement"] / max(values["weight"], 1e-9),
            "last_agreement": values["last_agreement"] / max(values["last_weight"], 1e-9),
            "grad_norm": float(nn.utils.clip_grad_norm_(list(self.trained.values()), config.clip_norm)),
        }
        problem = problem_of(row, progress.step + 1, self.work)
        if problem is not None:
            raise KvforgeError(problem)
        rate = learning_rate(config, progress.step, progress.total_steps)
        update(self.optimizer, rate)
        progress.step += 1
        progress.tokens += config.batch_size * self.data.length
        progress.seconds += time.perf_counter() - started
        row |= {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds, "lr": rate}
        progress.metrics = row
        step_log.append(self.work / step_log.METRICS_FILE, row, COLUMNS)
        return row

    def save(self) -> None:
        """Write the state."""
        save_run(self.work, self.trained, self.optimizer, self.identity, self.progress)
