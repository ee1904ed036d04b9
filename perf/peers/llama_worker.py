"""llama.cpp by llama-cpp-python's bindings, all sequences in one batch: LLAMA_PYTHON -m perf.peers.llama_worker MODEL.

Its own defaults but for threads, of which there is one for each core: a cache in float16, steps of 2048 tokens.
"""

import ctypes
import os
import sys

import llama_cpp
import numpy as np

from perf.peers.phases import PhaseTimes
from perf.peers.protocol import Run, serve

MAX_NUM_TOKENS = 2048


class Sequences:
    """A context of ``requests`` sequences of ``length`` tokens at most; ``decode`` computes tokens of them."""

    def __init__(self, model, requests: int, length: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch = requests, requests * length, MAX_NUM_TOKENS
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"no context of {requests} x {length} tokens")
        self._batch = llama_cpp.llama_batch_init(MAX_NUM_TOKENS, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (sequence, position, token, is wanted) ``rows``; returns the greedy tokens after the wanted ones."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (sequence, position, token, is_wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, is_wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        if status := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode gave {status}")
        wanted = [index for index, row in enumerate(rows) if row[3]]
        logits = (llama_cpp.llama_get_logits_ith(self.context, index) for index in wanted)
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in logits]

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self.context)


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Takes what llama.cpp says of each context."""


def load() -> Run:
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    file = os.path.join(sys.argv[1], "model.gguf")
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"{file} cannot be loaded")

    def run(prompts: np.ndarray, output_tokens: int) -> PhaseTimes:
        sequences = Sequences(model, len(prompts), prompts.shape[1] + output_tokens)
        try:
            sequences.decode([(0, position, 3, position == 0) for position in range(min(512, prompts.shape[1]))])
            sequences.clear()
            return timed(sequences, prompts, output_tokens)
        finally:
            sequences.close()

    run(np.full((1, MAX_NUM_TOKENS), 3), 4)
    return run


def timed(sequences: Sequences, prompts: np.ndarray, output_tokens: int) -> PhaseTimes:
    """Compute one prompt after the other, then a token of every sequence in each step."""
    input_tokens, times = prompts.shape[1], PhaseTimes()
    for sequence, prompt in enumerate(prompts.tolist()):
        rows = [(sequence, index, token, index == input_tokens - 1) for index, token in enumerate(prompt)]
        for first in range(0, input_tokens, MAX_NUM_TOKENS):
            times.first_tokens += sequences.decode(rows[first : first + MAX_NUM_TOKENS])
            times.lap(True, is_first=first + MAX_NUM_TOKENS >= input_tokens)
    tokens = times.first_tokens
    for position in range(input_tokens, input_tokens + output_tokens - 1):
        tokens = sequences.decode([(sequence, position, token, True) for sequence, token in enumerate(tokens)])
        times.lap(False, [position + 1] * len(tokens))
    return times


if __name__ == "__main__":
    serve(load)
