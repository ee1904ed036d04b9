"""The tables of ``perf.quality.minicache``."""

from typing import Any

from perf.harness.tables import markdown_table
from perf.quality.minicache_rows import MERGED, MINICACHE, SEEDS, TEACHER, TRAINED, UNTRAINED, Row
from perf.quality.scores import Cell, accuracy, difference, interval

Report = dict[str, Any]
BASE = "mean"
"""The init that the others are compared with: the paper's."""


def summarise(cells: dict[str, Cell]) -> dict[str, Any]:
    """Return the rows by slug: what was measured; where prompts were answered exact match with its interval, and the
    difference from the teacher paired by prompt."""
    teacher, rows = cells[TEACHER.slug], {}
    for slug, cell in cells.items():
        rows[slug] = {name: value for name, value in cell.items() if name != "correct"}
        if "correct" in cell:
            rows[slug] |= {**accuracy(cell), "versus_teacher": difference(teacher, cell)}
    return rows


def _line(row: Row, rows: dict[str, Any]) -> list[str]:
    cell = rows[row.slug]
    kl = cell["kl"]
    return [
        row.name,
        f"{cell['bytes_per_token']:.0f}",
        f"{100 * cell['retained']:.1f}" if row.merged else "",
        f"{kl['value']:.4f} ({kl['low']:.4f} to {kl['high']:.4f})",
        interval(cell["agreement"], "value"),
        interval(cell) if "accuracy" in cell else "",
        interval(cell["versus_teacher"], "difference", sign="+") if "accuracy" in cell else "",
    ]


def _seed_line(init: str, rows: dict[str, Any]) -> list[str]:
    """Return the KL of an init's seeds after distillation, and how far each is from ``BASE`` of the same seed."""
    found, base = ([rows[row.slug]["kl"]["value"] for row in TRAINED[name]] for name in (init, BASE))
    apart = [a - b for a, b in zip(found, base, strict=True)]
    return [
        f"`{init}`",
        f"{sum(found) / len(found):.5f}",
        ", ".join(f"{value:.5f}" for value in found),
        "" if init == BASE else ", ".join(f"{value:+.5f}" for value in apart),
    ]


def markdown(report: Report) -> str:
    """Return the tables with their explanation."""
    rows = report["rows"]
    low, middle, high = rows[MINICACHE.slug]["distance"]
    head = ["model", "bytes/token", "retained %", "KL per token", "agreement %", "exact match %", "vs no cut"]
    trained = tuple(row for init in TRAINED for row in TRAINED[init])
    lines = [
        "# Merged caches beside shared ones",
        "",
        "The tiny teacher and its students of cut 4 with 2-way AcrossKV, in float32. KL to the teacher in nats and "
        f"agreement of the likeliest token: after the first {report['document_prompt']} tokens of "
        f"{report['documents']} held-out documents, token by token, with 95% bootstrap intervals over documents. "
        "Exact match: "
        f"{rows[TEACHER.slug]['num_prompts']} prompts of {report['prompt_tokens']} tokens, greedy, with the 95% Wilson "
        "interval; the last column is paired by prompt. Bytes are those of a bf16 cache. A distillation is "
        f"{report['steps']} steps of {report['tokens_per_step']} tokens. {report['machine']}.",
        "",
        f"`{report['command']}`",
        "",
        markdown_table(head, [_line(row, rows) for row in (TEACHER, *MERGED, *UNTRAINED, *trained)]),
        "",
        f"Distances between the pairs' vectors, angle over pi: 5% are below {low:.2f}, half below {middle:.2f}, "
        f"95% below {high:.2f}.",
        "",
        f"## After distillation, by where it began (seeds {', '.join(map(str, SEEDS))})",
        "",
        markdown_table(
            ["init", "KL, mean", "by seed", f"minus `{BASE}` of the seed"],
            [_seed_line(init, rows) for init in TRAINED],
        ),
    ]
    return "\n".join(lines) + "\n"
