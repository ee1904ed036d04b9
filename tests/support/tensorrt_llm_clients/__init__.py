"""TensorRT-LLM's own Triton clients, run unmodified against this server. They are not part of this repository."""
