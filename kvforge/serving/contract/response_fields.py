"""What a response of `tensorrt_llm` says besides tokens: the names of its outputs, and the flags of `stream_state`."""

STREAM_STATE = "stream_state"
FINISH_REASON, STOP_REASON = "finish_reason", "stop_reason"
ERROR = "error"
"""The finish reason of a response that says why a request failed, for callers that want errors as tensors."""
FINAL, HEARTBEAT, SEQUENCE_END = 1, 2, 4
