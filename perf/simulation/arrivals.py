"""When requests arrive and how long they are."""

from dataclasses import dataclass

import numpy as np

from kvforge.common.errors import KvforgeError


@dataclass(frozen=True)
class Traffic:
    """``num_requests`` of ``input_tokens`` each, ``output_tokens`` generated for each, ``rate`` arriving a second.

    The pauses between arrivals are Gamma distributed with mean 1 / ``rate`` and a squared coefficient of variation of
    1 / ``burstiness``: 1 is a Poisson process, less than 1 comes in bursts. Rate 0: all are there at the beginning.
    """

    num_requests: int
    input_tokens: int
    output_tokens: int
    rate: float = 0.0
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if min(self.num_requests, self.input_tokens, self.output_tokens) < 1:
            raise KvforgeError("requests, input tokens and output tokens of simulated traffic are at least 1.")
        if not (0 <= self.rate < float("inf") and 0 < self.burstiness < float("inf")):
            raise KvforgeError("the rate of simulated traffic is at least 0 and its burstiness above 0, both finite.")


def arrival_times(traffic: Traffic, seed: int) -> np.ndarray:
    """Return the ``[num_requests]`` float64 times of arrival in seconds, ascending, the first after one pause."""
    if traffic.rate == 0:
        return np.zeros(traffic.num_requests)
    shape = traffic.burstiness
    pauses = np.random.default_rng(seed).gamma(shape, 1 / (traffic.rate * shape), traffic.num_requests)
    return np.cumsum(pauses)
