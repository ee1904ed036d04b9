"""The tables of ``perf.quality.minicache``."""

from typing import Any

from perf.harness.experiment import Report, columns_table, interval, told
from perf.harness.tables import markdown_table
from perf.quality.minicache_rows import MERGED, MINICACHE, SEEDS, TEACHER, TRAINED, UNTRAINED
from perf.quality.scores import Cell, accuracy, difference, percent

BASE = "mean"
"""The init that the others are compared with: the paper's."""


def summarise(cells: dict[str, Cell]) -> dict[str, Any]:
    """Return the rows by slug: what was measured; but for distilled students exact match with its interval, and the
    difference from the teacher paired by prompt."""
    teacher, rows = cells[TEACHER.slug], {}
    for slug, cell in cells.items():
        rows[slug] = {name: value for name, value in cell.items() if name != "correct"}
        if "correct" in cell:
            rows[slug] |= {**accuracy(cell), "versus_teacher": difference(teacher, cell)}
    return rows


COLUMNS = (
    ("model", "name"), ("bytes/token", "bytes_per_token", ".0f"),
    ("retained %", lambda cell: f"{100 * cell['retained']:.1f}" if cell["is_merged"] else ""),
    ("KL per token", lambda cell: interval(cell["kl"], 4)),
    ("agreement %", lambda cell: percent(cell["agreement"], "value")),
    ("exact match %", percent), ("vs no cut", lambda cell: percent(cell["versus_teacher"], "difference", sign="+")),
)  # fmt: skip


def _seed_line(init: str, rows: dict[str, Any]) -> list[str]:
    """Return the KL of an init's students before and after distillation, and how far each is from ``BASE``'s of the
    same seed."""
    curves, base = ([rows[row.slug]["curve"] for row in TRAINED[name]] for name in (init, BASE))
    found = [curve[-1][1] for curve in curves]
    apart = [value - other[-1][1] for value, other in zip(found, base, strict=True)]
    return [
        f"`{init}`",
        f"{curves[0][0][1]:.4f}",
        f"{sum(found) / len(found):.4f}",
        ", ".join(f"{value:.4f}" for value in found),
        "" if init == BASE else ", ".join(f"{value:+.4f}" for value in apart),
    ]


def markdown(report: Report) -> str:
    """Return the tables with their explanation."""
    rows = report["rows"]
    low, middle, high = rows[MINICACHE.slug]["distance"]
    shown = [rows[row.slug] | {"name": row.name, "is_merged": row.merged} for row in (TEACHER, *MERGED, *UNTRAINED)]
    head = ["init", "KL at step 0", "at the end, mean", "by seed", f"minus `{BASE}` of the seed"]
    parts = [
        "# Merged caches beside shared ones",
        told(report),
        "The tiny teacher and its students of cut 4 with 2-way AcrossKV, in float32. KL to the teacher in nats and "
        f"agreement of the likeliest token: after the first {report['document_prompt']} tokens of "
        f"{report['documents']} held-out documents, token by token, with 95% bootstrap intervals over documents. "
        "Exact match: "
        f"{rows[TEACHER.slug]['num_prompts']} prompts of {report['prompt_tokens']} tokens, greedy, with the 95% Wilson "
        "interval; the last column is paired by prompt. Bytes are those of a bf16 cache. A distillation is "
        f"{report['steps']} steps of {report['tokens_per_step']} tokens.",
        columns_table(COLUMNS, shown),
        f"Distances between the pairs' vectors, angle over pi: 5% are below {low:.2f}, half below {middle:.2f}, "
        f"95% below {high:.2f}.",
        "## Before and after distillation, by where it began",
        f"KL over the first {report['curve_documents']} of these documents, each whole and read in one piece; seeds "
        f"{', '.join(map(str, SEEDS))}.",
        markdown_table(head, [_seed_line(init, rows) for init in TRAINED]),
    ]
    return "\n\n".join(parts) + "\n"
