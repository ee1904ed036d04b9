"""Reading Hugging Face checkpoint directories: config, sharded safetensors, quantized weights and scales, hash."""

from kvforge.checkpoint.kv_scales import kv_scales
from kvforge.checkpoint.quantization import Quantization
from kvforge.checkpoint.reader import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "Quantization", "kv_scales", "open_checkpoint"]
