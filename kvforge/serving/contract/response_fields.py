"""What a response of `tensorrt_llm` says besides tokens: the names of its outputs."""

FINISH_REASON, STOP_REASON = "finish_reason", "stop_reason"
ERROR = "error"
"""The finish reason of a response that says why a request failed, for callers that want errors as tensors."""
