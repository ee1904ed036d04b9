"""Texts through an engine as if it had generated them: each token that it chooses is replaced by the text's."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvforge.runtime import LLMEngine, SamplingParams


def forced_logits(
    engine: LLMEngine, texts: Sequence[Sequence[int]], num_prompt: int | Sequence[int] = 1
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (text, place, logits [vocab] float32): the model's own for the token at ``place`` of a text, as they come.

    The first ``num_prompt`` tokens of each text, or as many as are given of each, are its prompt; every further one is
    computed in a decode step of its own. The engine has nothing else to do. Raises RuntimeError where a text cannot be
    computed.
    """
    scheduler: Any = engine.scheduler
    append = scheduler.append
    scheduler.append = lambda sequences, _: append(sequences, [texts[int(s.request_id)][s.length] for s in sequences])
    places = [num_prompt] * len(texts) if isinstance(num_prompt, int) else [*num_prompt]
    try:
        for index, text in enumerate(texts):
            num_forced = len(text) - places[index]
            params = SamplingParams(temperature=0.0, max_tokens=num_forced, ignore_eos=True, return_logits=True)
            engine.add_request(str(index), list(text[: places[index]]), params)
        while engine.has_unfinished():
            for output in engine.step():
                if output.finish_reason == "error":
                    raise RuntimeError(f"text {output.request_id}: {output.stop_reason}")
                index = int(output.request_id)
                for logits in output.logits or ():
                    yield index, places[index], logits
                    places[index] += 1
    finally:
        scheduler.append = append
