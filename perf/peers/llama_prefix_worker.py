"""Prompts' states in files by llama.cpp: LLAMA_PYTHON -m perf.peers.llama_prefix_worker MODEL.gguf PROMPTS FOLDER.

PROMPTS is a JSON list of lists of token ids. For each a line of JSON: seconds to compute it up to its first token, the
bytes that ``llama_state_seq_save_file`` writes, and the seconds to make a new context, as after a restart, to read
these and to compute the last token again; whether the first token is the same.
"""

import ctypes
import json
import os
import sys
import time

import llama_cpp

from perf.peers.llama_worker import MAX_NUM_TOKENS, Sequences, silent


def first_token(sequences: Sequences, prompt: list[int], start: int) -> int:
    """Compute a prompt from ``start`` on; returns the greedy token after it."""
    rows = [(0, index, token, index == len(prompt) - 1) for index, token in enumerate(prompt)]
    steps = (rows[first : first + MAX_NUM_TOKENS] for first in range(start, len(rows), MAX_NUM_TOKENS))
    return [sequences.decode(step) for step in steps][-1][0]


def measure(model: "llama_cpp.llama_model_p", prompt: list[int], path: bytes) -> dict[str, float]:
    """Return the row of a prompt."""
    ids = (llama_cpp.llama_token * len(prompt))(*prompt)
    sequences = Sequences(model, 1, len(prompt) + 64)
    start = time.perf_counter()
    token = first_token(sequences, prompt, 0)
    computed_s = time.perf_counter() - start
    start = time.perf_counter()
    size = llama_cpp.llama_state_seq_save_file(sequences.context, path, 0, ids, len(prompt))
    save_s = time.perf_counter() - start
    sequences.close()
    found, count = (llama_cpp.llama_token * len(prompt))(), ctypes.c_size_t()
    start = time.perf_counter()
    again = Sequences(model, 1, len(prompt) + 64)
    read = llama_cpp.llama_state_seq_load_file(again.context, path, 0, found, len(prompt), ctypes.byref(count))
    if not size or read != size or list(found) != prompt:
        raise RuntimeError(f"{path!r} of {size} bytes gave {read}")
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(again.context), 0, len(prompt) - 1, -1)
    same = first_token(again, prompt, len(prompt) - 1) == token
    restored_s = time.perf_counter() - start
    again.close()
    return {"computed_s": computed_s, "save_s": save_s, "bytes": size, "restored_s": restored_s, "is_equal": same}


def main() -> None:
    file, prompts, folder = sys.argv[1:]
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    with open(prompts, encoding="utf-8") as source:
        asked = json.load(source)
    first_token(Sequences(model, 1, MAX_NUM_TOKENS), asked[0][: MAX_NUM_TOKENS // 4], 0)
    for prompt in asked:
        print(json.dumps(measure(model, prompt, os.path.join(folder, "state.bin").encode())), flush=True)


if __name__ == "__main__":
    main()
