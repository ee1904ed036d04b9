"""Reading checkpoints, Hugging Face directories or GGUF files: config, tensors, quantized weights and scales, hash."""

from kvforge.checkpoint.kv_scales import kv_scales
from kvforge.checkpoint.opening import open_checkpoint
from kvforge.checkpoint.quantization import Quantization
from kvforge.checkpoint.reader import Checkpoint

__all__ = ["Checkpoint", "Quantization", "kv_scales", "open_checkpoint"]
