"""The tables of docs/kv-policies.md that the code has: ``python -m tests.support.compatibility_docs`` writes them."""

import re
from pathlib import Path

from kvforge.kv_policies.compatibility import needs_table, table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kv-policies.md"


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
