"""GGUF files, as llama.cpp and its converters write them, read as checkpoints."""

from kvforge.checkpoint.gguf.reading import open_gguf

__all__ = ["open_gguf"]
