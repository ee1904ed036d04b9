"""Which features go together: derived, pair by pair, from what one needs and the other limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from kvforge.common.errors import BuildError
from kvforge.kv_policies.features import Feature, Kind, Limitation, Support, all_features, needs_of
from kvforge.kv_policies.policy import Need
from kvforge.kv_policies.registry import defaults

_ORDER = tuple(Support)
_WORDS = {Support.YES: "yes", Support.CONDITION: "if", Support.NO: "no"}


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


def table() -> str:
    """Return the tables of docs/kv-policies.md: each pair once, above the diagonal, but for those of one kind, with
    numbers for the reasons; then these."""
    features = all_features()
    columns = features[1:]
    numbers: dict[str, int] = {}
    rows = []
    for index, row in enumerate(features[:-1]):
        cells = [
            _cell(compare(row, column), numbers) if index < position and are_apart(row, column) else ""
            for position, column in enumerate(columns, 1)
        ]
        if any(cells):
            rows.append([row.name, *cells])
    pairs = _markdown(["", *(column.name for column in columns)], rows)
    return f"{pairs}\n\n{_markdown(['', 'reason or condition'], [[str(n), text] for text, n in numbers.items()])}"


def are_apart(one: Feature, other: Feature) -> bool:
    """Return whether an engine may be asked for both: not of two policies, nor of two traits of the model."""
    return one.kind is not other.kind or one.kind is Kind.OTHER


def needs_table() -> str:
    """Return the table of what each policy needs; those with the same needs share a row."""
    kin: dict[frozenset[Need], list[str]] = {}
    for policy in defaults():
        kin.setdefault(needs_of(policy), []).append(f"`{policy.name}`")
    return _markdown(
        ["policy", "needs"],
        [
            [", ".join(names), "; ".join(need.value for need in Need if need in needs) or "nothing"]
            for needs, names in kin.items()
        ],
    )


def _cell(verdict: Compatibility, numbers: dict[str, int]) -> str:
    """What is said of a pair; reasons get the next of ``numbers``."""
    said = ", ".join(str(numbers.setdefault(reason, len(numbers) + 1)) for reason in verdict.reasons)
    return f"{_WORDS[verdict.support]} {said}".rstrip()


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))
