"""The tables of docs/kv-policies.md that the code has: ``python -m tests.support.compatibility_docs`` writes them."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvforge.kv_policies.compatibility import Compatibility, compare
from kvforge.kv_policies.features import Feature, Kind, Support, all_features, needs_of
from kvforge.kv_policies.policy import Need
from kvforge.kv_policies.registry import defaults

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kv-policies.md"
_WORDS = {Support.YES: "yes", Support.CONDITION: "if", Support.NO: "no"}


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


def updated(text: str) -> str:
    """Return the page with its tables, each between ``<!-- NAME -->`` and ``<!-- /NAME -->``, as the code has them."""
    for name, rows in (("compatibility", table()), ("needs", needs_table())):
        between = re.compile(rf"(?<=<!-- {name} -->\n).*(?=\n<!-- /{name} -->)", re.DOTALL)
        text, found = between.subn(lambda _, rows=rows: rows, text)
        if found != 1:
            raise ValueError(f"{DOCS} has {found} places for the table {name!r}; it should have one.")
    return text


if __name__ == "__main__":
    DOCS.write_text(updated(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
