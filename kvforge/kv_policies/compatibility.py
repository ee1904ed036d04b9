"""Which features go together: derived, pair by pair, from what one needs and the other limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from kvforge.common.errors import BuildError
from kvforge.kv_policies.features import Feature, Limitation, Support
from kvforge.kv_policies.policy import Need

_ORDER = tuple(Support)


@dataclass(frozen=True)
class Compatibility:
    """The worst of the limits that two features meet, and all of that kind with the need and who has it."""

    support: Support
    limits: tuple[tuple[Feature, Need, Limitation], ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, each once."""
        return tuple(dict.fromkeys(limit.reason for _, _, limit in self.limits))


def compare(one: Feature, other: Feature) -> Compatibility:
    """Return whether two features go together; the order does not matter."""
    met = [
        (needy, need, giver.limits[need])
        for needy, giver in ((one, other), (other, one))
        for need in Need
        if need in needy.needs and need in giver.limits
    ]
    if not met:
        return Compatibility(Support.YES)
    worst = max((limit.support for _, _, limit in met), key=_ORDER.index)
    return Compatibility(worst, tuple(item for item in met if item[2].support is worst))


def check(features: Sequence[Feature]) -> None:
    """Raise BuildError for the first pair of what an engine is to have that does not go together."""
    for one, other in combinations(features, 2):
        verdict = compare(one, other)
        if verdict.support is Support.NO:
            needy, need, limit = verdict.limits[0]
            giver = other if needy is one else one
            advice = limit.remedy or giver.remedy or needy.remedy
            raise BuildError(f"{needy.name} needs {need.value}, but with {giver.name} {limit.reason}; {advice}.")
