"""The tensors of TensorRT-LLM's Triton contract: read, checked, and as plain data. No Triton, no torch."""
