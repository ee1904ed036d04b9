"""Reading Hugging Face checkpoint directories: config, sharded safetensors, hash."""

from kvforge.checkpoint.reader import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
