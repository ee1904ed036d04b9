"""Trains the teacher: weighted next-token loss, Muon for the matrices of the layers, AdamW for the rest."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvforge.checkpoint import open_checkpoint
from kvforge.distill.loop import Progress, take_steps
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from model_defs import ModelConfig
from perf.training.config import TeacherConfig
from perf.training.documents import Batch, Encode
from perf.training.loop import StageRun


def new_model(config: ModelConfig, seed: int) -> SwiftKVForCausalLM:
    """A model before training: gains 1, matrices normal with 0.02, less where they write to the residual stream."""
    model = SwiftKVForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)
        else:
            nn.init.ones_(parameter)
    return model


def train_teacher(
    config: TeacherConfig,
    directory: Path,
    encode: Encode,
    device: str = "cpu",
    workers: int = 0,
    stop_after: int | None = None,
    start: Path | None = None,
) -> tuple[SwiftKVForCausalLM, Progress]:
    """Trains, or continues, the run in `directory`; deterministic for one machine and thread count on a CPU.

    `workers` processes make the batches. `start` is the checkpoint it begins with, in place of random weights. Returns
    the model on `device`.
    """
    torch.set_num_threads(config.threads)
    if start is None:
        model = new_model(config.model, config.seed)
    else:
        model = load_model(open_checkpoint(start), config.model, torch.float32)
    model.to(device)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or ".layers." not in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            logits = model(batch.input_ids)
        logits = logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        weight = batch.weight.flatten()
        return (losses * weight).sum() / weight.sum(), logits.detach().argmax(-1)

    run = StageRun(config, directory, encode, model, optimizers, loss_of, workers)
    take_steps(run, directory, config.checkpoint_every, stop_after, lambda row: None, True)
    return model, run.progress
