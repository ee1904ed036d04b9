"""Distillation of SwiftKV checkpoints from the teacher that is in their own weights."""
