"""Tokens, logits and greedy texts of a GGUF file by llama.cpp: LLAMA_PYTHON -m perf.peers.gguf_worker ASKED ANSWERED.

ASKED is a JSON file with ``file``, ``texts``, and ``prompts`` and ``greedy`` of token ids; ANSWERED gets the same keys.
Before that llama.cpp's quantizer makes the files of ``quantized``: of one, written to another, in a format.
"""

import ctypes
import json
import sys

import llama_cpp
import numpy as np


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Takes what llama.cpp says of each file."""


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        asked = json.load(file)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    for made in asked["quantized"]:
        quantize(*made)
    needs_weights = bool(asked["prompts"] or asked["greedy"])
    float32 = llama_cpp.GGML_TYPE_F32  # a cache of float16 would round besides
    settings = {"n_ctx": 2048, "logits_all": True, "verbose": False, "n_gpu_layers": 0}
    model = llama_cpp.Llama(
        asked["file"], vocab_only=not needs_weights, type_k=float32, type_v=float32, flash_attn=False, **settings
    )
    answer = {"texts": [model.tokenize(text.encode(), True, True) for text in asked["texts"]]}
    answer["prompts"] = [logits_of(model, ids).tolist() for ids in asked["prompts"]]
    answer["greedy"] = [greedy(model, ids, asked["output_tokens"]) for ids in asked["greedy"]]
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)


def quantize(file: str, written: str, form: str) -> None:
    """Write a file with its weights in a format of llama.cpp, by what is behind ``LLAMA_FTYPE_`` in its names."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_{form}"), True
    if status := llama_cpp.llama_model_quantize(file.encode(), written.encode(), ctypes.byref(settings)):
        raise RuntimeError(f"llama_model_quantize gave {status} for {file}")


def logits_of(model: "llama_cpp.Llama", ids: list[int]) -> np.ndarray:
    """Float32 ``[tokens, vocabulary]``."""
    model.reset()
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def greedy(model: "llama_cpp.Llama", ids: list[int], count: int) -> list[int]:
    """The ``count`` likeliest tokens after ``ids``, one after the other."""
    model.reset()
    model.eval(ids)
    found = []
    for position in range(len(ids), len(ids) + count):
        found.append(int(model.scores[position - 1].argmax()))
        model.eval(found[-1:])
    return found


if __name__ == "__main__":
    main()
