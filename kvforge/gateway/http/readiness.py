"""Whether a request sent now would be served: Triton, the engine behind it, and this process."""

import time
from pathlib import Path

import numpy as np

from kvforge.gateway.engine.tensors import infer_request, request_template
from kvforge.gateway.engine.triton import Triton, first_piece
from kvforge.runtime.requests.params import SamplingParams
from kvforge.serving.processes.run_dir import StateReader

CANARY_S = 5.0
"""How long the answer of a canary request holds."""
CANARY_TIMEOUT_S = 10.0


class Readiness:
    """Triton's own readiness says nothing of the engine process: that is read from the stub's state file where
    there is one, and found by a request for one token where Triton runs elsewhere."""

    def __init__(self, triton: Triton, state_file: Path | None, vocab_size: int) -> None:
        self._triton = triton
        self._state = None if state_file is None else StateReader(state_file.parent)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self._template = request_template(params, vocab_size, False, timeout_s=CANARY_TIMEOUT_S)
        self._canary: tuple[float, str | None] = (-CANARY_S, "the engine has not answered yet")

    async def problem(self) -> str | None:
        """Why requests would not be served, or None."""
        if not await self._triton.is_ready():
            return "the inference server is not ready"
        if self._state is not None:
            state = self._state.read()
            return "the engine's state is not known" if state is None else state.problem
        asked, problem = self._canary
        if time.monotonic() - asked >= CANARY_S:
            problem = await self._ask()
            self._canary = (time.monotonic(), problem)
        return problem

    async def _ask(self) -> str | None:
        request = infer_request(self._template, "kvforge-canary", np.zeros(1, dtype=np.int32).tobytes())
        return None if await first_piece(self._triton, request) else "the engine does not answer"
