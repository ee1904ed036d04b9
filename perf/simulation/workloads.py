"""What is served by a real engine and by the simulator: some small workloads, or the curves of two experiments."""

from collections.abc import Mapping

from perf.simulation.arrivals import Traffic
from perf.simulation.cost_model import CostModel
from perf.simulation.experiments import Setting, capacity

SMALL = {
    "chat": Traffic(8, 256, 64),
    "prompts": Traffic(4, 1000, 16),
    "many": Traffic(32, 100, 24),
    "arriving": Traffic(16, 200, 24, rate=2.0),
}
LENGTHS = {f"{length} in": Traffic(8, length, 32) for length in (125, 250, 500, 1000, 2000)}
"""All requests at once: the curve of `--experiment lengths`, in sizes that two cores serve in minutes."""
LOADS = (0.3, 0.6, 0.8, 0.95)
"""Arrival rates as parts of what the first engine can serve: the curve of `--experiment rates`."""
ARRIVING = Traffic(24, 500, 32)
KINDS = ("small", "lengths", "rates")


def workloads(kind: str, costs: Mapping[str, CostModel]) -> dict[str, Traffic]:
    """Return the workloads of a kind by name; the first of ``costs`` sets the scale of arrival rates."""
    if kind != "rates":
        return {"small": SMALL, "lengths": LENGTHS}[kind]
    setting = Setting(dict(costs), 200, ARRIVING.input_tokens, ARRIVING.output_tokens)
    best = capacity(setting, next(iter(costs)))
    rates = [round(load * best, 3) for load in LOADS]
    return {
        f"{rate} a second": Traffic(ARRIVING.num_requests, ARRIVING.input_tokens, ARRIVING.output_tokens, rate)
        for rate in rates
    }
