"""The models around `tensorrt_llm` that turn text to tokens and back."""
