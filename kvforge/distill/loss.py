"""The distillation loss as sums over positions, so that any split into chunks, micro-batches and processes adds up.

T^2 KL(teacher || student) at temperature T (arXiv 2410.03960, section 3.4), the same for an early-exit head
(appendix E), and the error of the hidden states entering the last layer. Only positions with a weight take part:
logits of the others are never computed.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 25
"""Elements of one chunk's logits (128 MiB in fp32); several such tensors live at once."""

Head = Callable[[Tensor], Tensor]


def divergence(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) of each row: logits ``[n, vocab]`` -> ``[n]`` fp32."""
    student = F.log_softmax(student_logits.float() / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


def hidden_error(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of the mean square differences of ``[n, hidden]``; ``weight`` ``[n]``."""
    return ((student.float() - teacher.float()).square().mean(-1) * weight).sum()


def logit_sums(
    student: Tensor,
    teacher: Tensor,
    early: Tensor | None,
    weight: Tensor,
    head: Head,
    teacher_head: Head,
    early_head: Head,
    temperature: float,
    vocab_size: int,
    max_logits: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums of T^2 KL of the student and of the early-exit head, and of equal argmax.

    ``student``, ``teacher`` (normalised outputs) and ``early`` (hidden states entering the cut) are ``[n, hidden]``,
    ``weight`` ``[n]``. Logits are made for at most ``max_logits / vocab_size`` positions at a time, and made again in
    the backward pass where there is more than one such chunk.
    """

    def sums(student: Tensor, teacher: Tensor, early: Tensor | None, weight: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher_head(teacher).float()
        logits = head(student).float()
        kl = (divergence(logits, target, temperature) * weight).sum()
        agreement = ((logits.detach().argmax(-1) == target.argmax(-1)) * weight).sum()
        if early is None:
            return torch.stack((kl, torch.zeros_like(kl), agreement))
        early_kl = (divergence(early_head(early), target, temperature) * weight).sum()
        return torch.stack((kl, early_kl, agreement))

    size = max(1, max_logits // vocab_size)
    if len(weight) <= size:
        total = sums(student, teacher, early, weight)
    else:
        parts = []
        for begin in range(0, len(weight), size):
            chunk = slice(begin, begin + size)
            cut = None if early is None else early[chunk]
            parts.append(checkpoint(sums, student[chunk], teacher[chunk], cut, weight[chunk], use_reentrant=False))
        total = torch.stack(parts).sum(0)
    return total[0], total[1], total[2]
