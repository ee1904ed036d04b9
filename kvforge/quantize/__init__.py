"""Quantizing a checkpoint; its FP8 recipes need the extra ``modelopt``, and nothing of it runs in an engine."""

from kvforge.quantize.export import RECIPES, QuantizeSummary, quantize_checkpoint

__all__ = ["RECIPES", "QuantizeSummary", "quantize_checkpoint"]
