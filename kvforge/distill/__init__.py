"""Distillation of SwiftKV checkpoints from the teacher that is in their own weights."""

from kvforge.distill.config import DistillConfig
from kvforge.distill.train import Progress, distill

__all__ = ["DistillConfig", "Progress", "distill"]
