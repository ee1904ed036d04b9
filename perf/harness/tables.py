"""Rows as tables: Markdown for files, columns of one width for a terminal."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "") -> str:
    """Return a table of ``rows``, whose cells are shown as ``str`` does; ``align`` has a letter a column, ``r`` for
    numbers at the right, and is all ``l`` where it is not given."""
    rules = ["---:" if letter == "r" else "---" for letter in align or "l" * len(head)]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rules)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


class Column(NamedTuple):
    """A column of a terminal's table: title, where its value stands in a row, width and format (``>8.2f``), and what a
    number is multiplied with. A value that a row lacks is shown as nothing."""

    title: str
    value: str | Callable[[Row], Any]
    form: str
    unit: float = 1.0

    @property
    def width(self) -> str:
        """Alignment and width of ``form``: ``>8``."""
        return self.form.split(".")[0].rstrip("sdfg")

    def cell(self, row: Row) -> str:
        """Return the column's text of a row."""
        value = self.value(row) if callable(self.value) else row.get(self.value)
        if value is None:
            return format("", self.width)
        return format(value if self.unit == 1.0 else value * self.unit, self.form)


def text_table(columns: Sequence[Column], rows: Iterable[Row], header: bool = True, gap: str = " ") -> str:
    """Return a line a row under a line of titles, which ``header`` can leave out."""
    lines = [gap.join(format(column.title, column.width) for column in columns)] if header else []
    return "\n".join([*lines, *(gap.join(column.cell(row) for column in columns) for row in rows)])
