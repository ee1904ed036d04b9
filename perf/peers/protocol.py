"""JSON lines between the comparison and a system that stays loaded: one request per line in, one answer per line out.

The worker says ``{"ready": true}`` when it is loaded and warm. A request has ``requests``, ``input_tokens``,
``output_tokens`` and ``seed``; the answer has the fields of ``PhaseTimes``, or ``error`` with a text. The end of its
input ends a worker. Whatever else it prints goes to stderr.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable

import numpy as np

from perf.peers.phases import PhaseTimes

FIRST_TOKEN_ID, LAST_TOKEN_ID = 3, 30000
"""Prompts avoid the lowest ids, which are special tokens."""

Run = Callable[[np.ndarray, int], PhaseTimes]
"""Prompts int64 [requests, input_tokens] and the number of output tokens of each."""


def serve(load: Callable[[], Run]) -> None:
    """Load a system, then run what stdin asks for until it ends; prompts of one seed are the same in every system."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do not get between the lines
    run = load()
    _tell(answers, {"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        shape = (asked["requests"], asked["input_tokens"])
        prompts = np.random.default_rng(asked["seed"]).integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, shape)
        try:
            answer = dataclasses.asdict(run(prompts, asked["output_tokens"]))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _tell(answers, answer)


def _tell(answers, answer: dict) -> None:
    print(json.dumps(answer), file=answers, flush=True)
