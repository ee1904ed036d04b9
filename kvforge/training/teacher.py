"""Trains the teacher: weighted next-token loss, Muon for the matrices of the layers, AdamW for the rest."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kvforge.training.config import TeacherConfig
from kvforge.training.documents import Batch, Encode
from kvforge.training.loop import Progress, run_stages
from kvforge.training.model import LanguageModel


def weighted_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy over targets, weighted by `batch.weight`. `logits` [B, T, vocab] fp32."""
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    weight = batch.weight.flatten()
    return (losses * weight).sum() / weight.sum()


def train_teacher(
    config: TeacherConfig, directory: Path, encode: Encode, stop_after: int | None = None
) -> tuple[LanguageModel, Progress]:
    """Trains, or continues, the run in `directory`; deterministic for one machine and thread count."""
    torch.set_num_threads(config.threads)
    model = LanguageModel(config.model, seed=config.seed)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or ".layers." not in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch.input_ids)
        logits = logits.float()
        return weighted_loss(logits, batch), logits.detach().argmax(-1)

    progress = run_stages(
        directory=directory,
        stages=config.stages,
        seed=config.seed,
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        clip_norm=config.clip_norm,
        checkpoint_every=config.checkpoint_every,
        encode=encode,
        trained=model,
        parameters=model.parameters(),
        optimizers=optimizers,
        loss_of=loss_of,
        stop_after=stop_after,
    )
    return model, progress
