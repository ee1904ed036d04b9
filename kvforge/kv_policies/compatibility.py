"""Which features go together: derived, pair by pair, from what one needs and the other limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from kvforge.common.errors import BuildError
from kvforge.kv_policies.features import Feature, Limitation, Support, all_features
from kvforge.kv_policies.policy import KVPolicy, Need

_ORDER = tuple(Support)


@dataclass(frozen=True)
class Verdict:
    """The worst of the limits that two features meet, and all of that kind with the need and who has it."""

    support: Support
    limits: tuple[tuple[Feature, Need, Limitation], ...] = ()

    @property
    def text(self) -> str:
        """The answer with its reasons, as the table shows it."""
        reasons = "; ".join(dict.fromkeys(limit.reason for _, _, limit in self.limits))
        prefix = {Support.YES: "yes", Support.NO: "no: ", Support.CONDITION: "if: "}[self.support]
        return prefix + reasons


def compare(one: Feature, other: Feature) -> Verdict:
    """Return whether two features go together; the order does not matter."""
    met = [
        (needy, need, giver.limits[need])
        for needy, giver in ((one, other), (other, one))
        for need in Need
        if need in needy.needs and need in giver.limits
    ]
    if not met:
        return Verdict(Support.YES)
    worst = max((limit.support for _, _, limit in met), key=_ORDER.index)
    return Verdict(worst, tuple(item for item in met if item[2].support is worst))


def check(features: Sequence[Feature]) -> None:
    """Raise BuildError for the first pair of what an engine is to have that does not go together."""
    for one, other in combinations(features, 2):
        verdict = compare(one, other)
        if verdict.support is Support.NO:
            needy, need, limit = verdict.limits[0]
            giver = other if needy is one else one
            raise BuildError(f"{needy.name} needs {need.value}, but with {giver.name} {limit.reason}; {giver.remedy}.")


def table() -> str:
    """Return the table of docs/kv-policies.md: each pair once, above the diagonal, but for those of two policies."""
    features = all_features()
    columns = features[1:]
    lines = [["", *(column.name for column in columns)], ["---"] * (1 + len(columns))]
    for index, row in enumerate(features[:-1]):
        cells = [
            compare(row, column).text if index < position and not (row.is_policy and column.is_policy) else ""
            for position, column in enumerate(columns, 1)
        ]
        lines.append([row.name, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def needs_table(policies: Sequence[type[KVPolicy]]) -> str:
    """Return the table of what each policy needs."""
    lines = ["| policy | needs |", "| --- | --- |"]
    for policy in policies:
        needs = "; ".join(need.value for need in Need if need in policy.needs)
        lines.append(f"| `{policy.name}` | {needs or 'nothing'} |")
    return "\n".join(lines)
