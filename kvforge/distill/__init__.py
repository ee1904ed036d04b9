"""Distillation of SwiftKV checkpoints from the teacher that is in their own weights."""

from kvforge.distill.config import DistillConfig
from kvforge.distill.loop import Progress
from kvforge.distill.run import DistillSummary, distill_checkpoint
from kvforge.distill.train import distill

__all__ = ["DistillConfig", "DistillSummary", "Progress", "distill", "distill_checkpoint"]
