"""Rows as tables: Markdown for files, columns of one width for a terminal."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

Row = dict[str, Any]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "") -> str:
    """Return a table of ``rows``, whose cells are shown as ``str`` does; ``align`` has a letter a column, ``r`` for
    numbers at the right, and is all ``l`` where it is not given."""
    rules = ["---:" if letter == "r" else "---" for letter in align or "l" * len(head)]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rules)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


class Column(NamedTuple):
    """A column of a table: title, where its value stands in a row (or what it makes of a row), width and format
    (``>8.2f``, or a sentence such as ``{:.0f} MB``), and what a number is multiplied with. A value that a row lacks is
    shown as nothing."""

    title: str
    value: str | Callable[[Row], Any]
    form: str = ""
    unit: float = 1.0

    @property
    def width(self) -> str:
        """Alignment and width of ``form``: ``>8``."""
        found = re.match(r"[<>]?\d*", self.form)
        return found[0] if found else ""

    def cell(self, row: Row) -> str:
        """Return the column's text of a row."""
        value = self.value(row) if callable(self.value) else row.get(self.value)
        if value is None:
            return format("", self.width)
        value = value if self.unit == 1.0 else value * self.unit
        return self.form.format(value) if "{" in self.form else format(value, self.form)


def columns_table(columns: Sequence[Sequence[Any]], rows: Iterable[Row], align: str = "") -> str:
    """Return a table in Markdown of columns as ``Column`` has them."""
    made = [Column(*each) for each in columns]
    return markdown_table([each.title for each in made], [[each.cell(row) for each in made] for row in rows], align)


def text_table(columns: Sequence[Sequence[Any]], rows: Iterable[Row], header: bool = True, gap: str = " ") -> str:
    """Return a line a row under a line of titles, which ``header`` can leave out."""
    made = [Column(*each) for each in columns]
    lines = [gap.join(format(each.title, each.width) for each in made)] if header else []
    return "\n".join([*lines, *(gap.join(each.cell(row) for each in made) for row in rows)])


def interval(
    estimate: Mapping[str, Any], digits: int, factor: float = 1, sign: str = "", kind: str = "f", value: str = "value"
) -> str:
    """Return an estimate with its interval: ``value (low to high)``."""
    low, middle, high = (f"{factor * estimate[part]:{sign}.{digits}{kind}}" for part in ("low", value, "high"))
    return f"{middle} ({low} to {high})"


def spread(values: Sequence[float], digits: int, factor: float = 1) -> str:
    """Return the median of values, with the least and the most."""
    middle, low, high = (f"{factor * value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"
