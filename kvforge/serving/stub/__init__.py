"""The `tensorrt_llm` model: between Triton and the engine process."""
