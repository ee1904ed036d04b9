"""Checkpoints by their name on the Hugging Face Hub: into huggingface_hub's cache, and out of it without a network."""

from kvforge.hub.download import find_checkpoint, find_config
from kvforge.hub.names import HubName, parse_name

__all__ = ["HubName", "find_checkpoint", "find_config", "parse_name"]
