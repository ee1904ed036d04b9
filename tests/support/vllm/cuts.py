"""Families whose checkpoints with a cut vLLM runs, by kvforge's plugin."""

RUN = ("llama", "mistral", "phi3", "qwen2", "qwen3")
