"""A sequence through an engine whose generated tokens are given."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.eviction.kept import Kept, KeptSets


def run_forced(
    engine: LLMEngine, prompt_ids: Sequence[int], forced_ids: Sequence[int], request_id: str = "forced"
) -> tuple[Kept, np.ndarray]:
    """Return what was kept at each eviction, and the logits ``[len(forced) + 1, vocab]`` of the last prompt token and
    of each forced one. The engine has nothing else to do."""
    kept, given, logits = KeptSets(engine), iter([*forced_ids, 0]), []
    append: Any = engine.scheduler.append
    engine.scheduler.append = lambda sequences, tokens: append(sequences, [next(given) for _ in sequences])  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=len(forced_ids) + 1, ignore_eos=True, return_logits=True)
    engine.add_request(request_id, list(prompt_ids), params)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.finish_reason != "error", output.stop_reason
            logits += output.logits
        engine.check_invariants()
    engine.scheduler.append = append  # type: ignore[method-assign]
    return kept.of(request_id, 0), np.stack(logits)
