"""Distils a SwiftKV student from its teacher, which share every weight the student does not replace.

Both are identical below the cut, so those layers run once. Loss (arXiv 2410.03960, section 4):
T^2 KL(teacher || student) at temperature T, plus the error of the hidden states entering the last layer.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kvforge.training.config import StudentConfig
from kvforge.training.documents import Batch, Encode
from kvforge.training.loop import Progress, run_stages
from kvforge.training.model import LanguageModel
from kvforge.training.student import init_student, new_parameter


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """sum(values * weight) / sum(weight), both [B, T]: positions of weight 0 count in neither."""
    return (values * weight).sum() / weight.sum()


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    weight: Tensor,
    temperature: float,
    hidden_weight: float,
) -> Tensor:
    """Logits [B, T, vocab] fp32 and hidden states [B, T, hidden] of both models -> scalar.

    `weight[b, t]` is that of predicting token t+1 from position t: the last prompt position, whose next
    token is the first of the answer, is included; the answer's last token is not. The hidden-state error is
    relative to the teacher's mean square, so that its weight does not depend on the scale of the states.
    """
    divergence = F.kl_div(
        F.log_softmax(student_logits / temperature, dim=-1),
        F.log_softmax(teacher_logits / temperature, dim=-1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    loss = temperature**2 * weighted_mean(divergence, weight)
    teacher_hidden = teacher_hidden.float()
    error = (student_hidden.float() - teacher_hidden).pow(2).mean(-1)
    scale = weighted_mean(teacher_hidden.pow(2).mean(-1), weight)
    return loss + hidden_weight * weighted_mean(error, weight) / scale


def is_trained(name: str, cut: int, train_upper: bool) -> bool:
    """Whether distillation changes the student's parameter of this name."""
    if new_parameter(name):
        return True
    return train_upper and ".layers." in name and int(name.split(".")[2]) >= cut


def distill_student(
    config: StudentConfig,
    teacher: LanguageModel,
    directory: Path,
    encode: Encode,
    stop_after: int | None = None,
) -> tuple[LanguageModel, Progress]:
    """Distils, or continues, the run in `directory`. The teacher is not changed."""
    torch.set_num_threads(config.threads)
    teacher.requires_grad_(False)
    student = init_student(teacher, config.cut, config.group_size)
    trained = {}
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(is_trained(name, config.cut, config.train_upper))
        if parameter.requires_grad:
            trained[name] = parameter
    optimizers = [
        torch.optim.Muon(
            [p for p in trained.values() if p.dim() == 2],
            lr=config.lr,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [p for p in trained.values() if p.dim() != 2],
            lr=config.lr,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=True,
        ),
    ]

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                h = teacher.model.lower(batch.input_ids, config.cut)
                output, teacher_hidden = teacher.model.upper(h, config.cut)
                teacher_logits = teacher.head(output).float()
            output, student_hidden = student.model.upper(h)
            logits = student.head(output)
        logits = logits.float()
        loss = distillation_loss(
            logits,
            teacher_logits,
            student_hidden,
            teacher_hidden,
            batch.weight,
            config.temperature,
            config.hidden_weight,
        )
        return loss, logits.detach().argmax(-1)

    progress = run_stages(
        directory=directory,
        stages=config.stages,
        seed=config.seed,
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        clip_norm=config.clip_norm,
        checkpoint_every=config.checkpoint_every,
        encode=encode,
        trained=student,
        parameters=trained.values(),
        optimizers=optimizers,
        loss_of=loss_of,
        stop_after=stop_after,
    )
    return student, progress
