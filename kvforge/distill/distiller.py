"""Teacher and student on one micro-batch, to the weighted sums that the loss is made of.

A module of its own, so that FSDP can gather what belongs to no layer (embedding, norms, LM heads) once per call.
"""

import copy

import torch
from torch import Tensor, nn

from kvforge.distill.config import DistillConfig
from kvforge.distill.loss import MAX_LOGITS, hidden_error, logit_sums
from kvforge.distill.packing import Batch
from kvforge.distill.trained_parameters import has_early_exit
from kvforge.swiftkv import Layout, SwiftKVForCausalLM, make_layout

SUMS = ("kl", "hidden", "early_exit_kl", "agreement")


class Distiller(nn.Module):
    """With ``train`` ``partial``, teacher and student are one set of weights, which the layers below the cut run
    through once (arXiv 2410.03960, section 3.4); otherwise, and with a blind cut, the teacher is a frozen copy made
    here."""

    def __init__(self, student: SwiftKVForCausalLM, config: DistillConfig, max_logits: int = MAX_LOGITS) -> None:
        super().__init__()
        self.config, self.max_logits = config, max_logits
        self.student = student
        self.copy: SwiftKVForCausalLM | None = None
        if config.train != "partial" or student.sizes.is_blind:
            self.copy = copy.deepcopy(student).requires_grad_(False)
            if config.dtype == "float32":
                self.copy.float()

    @property
    def teacher(self) -> SwiftKVForCausalLM:
        """The model whose upper layers run with the projections they had before the cut."""
        return self.student if self.copy is None else self.copy

    def forward(self, batch: Batch, only_scale: bool = False) -> Tensor:
        """Return ``[4]`` fp32, the sums named in SUMS over the micro-batch: position (b, t) counts ``weight[b, t]``
        times. ``hidden`` sums the mean square error of the states entering the last layer; with ``only_scale``, the
        mean square of the teacher's states instead, and the student does not run.
        """
        device = self.student.model.embed_tokens.weight.device
        input_ids, weight = batch.input_ids.to(device), batch.weight.to(device)
        chosen, sizes = weight > 0, self.student.sizes
        answers = chosen if sizes.is_blind else None
        layout = make_layout(sizes, input_ids.shape[1], batch.segments, device, answers)
        weight = weight[chosen]
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            hidden, teacher_output, teacher_last = self._teacher(input_ids, layout, chosen)
            if only_scale:
                scale = (teacher_last.float().square().mean(-1) * weight).sum()
                return torch.stack((torch.zeros_like(scale), scale, *torch.zeros_like(scale).expand(2)))
            if self.config.train == "full":
                hidden = self.student.model.lower(input_ids, layout)
            output, last = self.student.model.upper(hidden, layout)
            kl, early_exit_kl, agreement = logit_sums(
                output[chosen],
                teacher_output,
                hidden[chosen].detach() if has_early_exit(self.student) else None,
                weight,
                self.student.head,
                self.teacher.head,
                self.student.early_exit_logits,
                self.config.temperature,
                self.student.sizes.vocab_size,
                self.max_logits,
            )
        error = hidden_error(last[chosen], teacher_last, weight)
        return torch.stack((kl, error, early_exit_kl, agreement))

    @torch.no_grad()
    def _teacher(self, input_ids: Tensor, layout: Layout, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all hidden states entering the cut ``[B, T, hidden]``, and of the chosen positions ``[n, hidden]``
        the teacher's normalised output and the states entering its last layer."""
        hidden = self.teacher.model.lower(input_ids, layout)
        output, last = self.teacher.model.upper(hidden, layout, teacher=True)
        return hidden, output[chosen], last[chosen]
