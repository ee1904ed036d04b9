"""Builds the output tensors of one response of `tensorrt_llm`, as arrays by name; only the requested ones."""

import numpy as np

from kvforge.serving.active import ActiveRequest, Chunk

STREAM_STATE = "stream_state"
FINAL, HEARTBEAT, SEQUENCE_END = 1, 2, 4


def chunk_arrays(active: ActiveRequest, chunk: Chunk) -> dict[str, np.ndarray]:
    """Tensors of TensorRT-LLM's contract: output_ids [1, 1, n], sequence_length [1, 1], scalars [1, 1].

    `stream_state` [1, 3 + c] int64 is for postprocessing: stream key, sequence number, flags, and with the
    first response of a sequence the c last prompt tokens, which a text without its prompt is decoded after.
    """
    sequence, request = chunk.sequence, chunk.sequence.request
    flags = (FINAL if chunk.final else 0) | (SEQUENCE_END if sequence.reported else 0)
    arrays = {
        "output_ids": _int32(chunk.tokens).reshape(1, 1, -1),
        "sequence_length": _int32([[len(chunk.tokens)]]),
        "batch_index": _int32([[sequence.batch_index]]),
        "sequence_index": _int32([[sequence.sequence_index]]),
        STREAM_STATE: _state(active, active.sequences.index(sequence), flags, chunk.context),
    }
    if request.return_log_probs:
        arrays["cum_log_probs"] = np.array([[chunk.cum_log_prob]], dtype=np.float32)
        arrays["output_log_probs"] = np.array(chunk.log_probs, dtype=np.float32).reshape(1, 1, -1)
    if request.return_num_input_tokens:
        arrays["num_input_tokens"] = _int32([[len(request.prompt)]])
    if request.return_num_output_tokens:
        arrays["num_output_tokens"] = _int32([[chunk.num_generated]])
    return {name: array for name, array in arrays.items() if name in active.outputs}


def heartbeat_arrays(active: ActiveRequest) -> dict[str, np.ndarray]:
    """A response without tokens; postprocessing swallows it."""
    return {
        "output_ids": np.zeros((1, 1, 0), dtype=np.int32),
        "sequence_length": _int32([[0]]),
        STREAM_STATE: _state(active, 0, HEARTBEAT, []),
    }


def _state(active: ActiveRequest, sequence: int, flags: int, context: list[int]) -> np.ndarray:
    return np.array([[active.key, sequence, flags, *context]], dtype=np.int64)


def _int32(values: list) -> np.ndarray:
    return np.array(values, dtype=np.int32)
