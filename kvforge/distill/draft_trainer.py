"""The training loop of a draft head, resumable: distillation's packing, rates and states around other sums."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from kvforge.distill import world
from kvforge.distill.config import DistillConfig
from kvforge.distill.draft_module import DraftModule, down
from kvforge.distill.lock import locked
from kvforge.distill.loop import Progress, SequenceRun, take_steps
from kvforge.distill.loss import divergence
from kvforge.distill.packing import Batch, PackedData
from kvforge.distill.trained_parameters import fingerprint
from kvforge.swiftkv import Layout, SwiftKVForCausalLM, make_layout
from model_defs.draft_head import DraftHead

NUM_PASSES = 4
"""Drafts behind one another that a head is trained to give."""
DECAY = 0.8
"""What a pass counts beside the one before it."""
COLUMNS = ("step", "tokens", "seconds", "lr", "loss", "agreement", "last_agreement", "grad_norm")
SUMS = ("loss", "agreement", "weight", "last_agreement", "last_weight")


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
) -> Progress:
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


class _HeadRun(SequenceRun[Progress]):
    columns = COLUMNS

    def __init__(self, trainee: DraftTrainee, data: PackedData, work: Path) -> None:
        self.trainee = trainee
        identity = trainee.config.identity() | {
            "head": dataclasses.asdict(trainee.head),
            "tokens": trainee.token_of.tolist(),
            "teacher": fingerprint(trainee.target, only_teacher=False),
        }
        trained = dict(trainee.module.named_parameters())
        super().__init__(trainee.config, work, trained, identity, Progress(), data)

    def step(self) -> dict[str, float]:
        """Do one optimizer step; returns its line of the log."""
        started = time.perf_counter()
        batches, total = self.batches()
        sums = torch.zeros(len(SUMS), device=self.device)
        for batch in batches:
            part = self.trainee(batch)
            (part[0] / total).backward()
            sums += part.detach()
        values = dict(zip(SUMS, sums.tolist(), strict=True))
        row = {
            "loss": values["loss"] / total,
            "agreement": values["agreement"] / max(values["weight"], 1e-9),
            "last_agreement": values["last_agreement"] / max(values["last_weight"], 1e-9),
            "grad_norm": float(nn.utils.clip_grad_norm_(list(self.trained.values()), self.config.clip_norm)),
        }
        return self.finish_step(row, started)
