"""The report of ``kvforge eval`` as text and as a figure."""

from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from kvforge.evaluation.early_exit import alignment_table
from kvforge.evaluation.exit_quality import exit_table
from kvforge.evaluation.run import Report
from kvforge.evaluation.score import TaskScore, score_table


def describe(report: Report) -> str:
    """Return the tables of a report: tasks, difference from the teacher, answers with exits, documents, early exit."""
    parts, rows = [], report.scores
    if rows:
        fields = TaskScore.__dataclass_fields__
        parts.append(score_table([TaskScore(**{name: row[name] for name in fields}) for row in rows]))
    if rows and report.teacher:
        parts.append(_paired_table(rows))
    parts += [exit_table(quality) for quality in (report.exits, report.exits_of_prompts) if quality is not None]
    if report.documents is not None:
        parts.append(_document_table(report.documents))
    if report.early_exit is not None:
        parts.append(f"early exit, on {report.early_exit_on}\n{alignment_table(report.early_exit)}")
    return "\n\n".join(parts)


def _paired_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'task':<15}{'teacher':>9}{'engine':>9}{'difference':>12}   {'95% interval':<16}"
        f"{'gained':>7}{'lost':>6}{'p':>8}"
    ]
    for row in rows:
        paired = row["versus_teacher"]
        interval = f"{100 * paired['low']:+.1f} to {100 * paired['high']:+.1f}"
        lines.append(
            f"{row['task']:<15}{100 * row['teacher']['accuracy']:>8.1f}%{100 * row['accuracy']:>8.1f}%"
            f"{100 * paired['difference']:>+12.1f}   {interval:<16}{paired['gained']:>7}{paired['lost']:>6}"
            f"{paired['p_value']:>8.2g}"
        )
    return "\n".join(lines)


def _document_table(documents: dict[str, Any]) -> str:
    lines = [
        f"{documents['num_documents']} documents ({documents['source']}), {documents['num_tokens']} tokens scored",
        f"{'measure':<34}{'value':>10}   95% interval",
    ]
    for key, name, digits, scale in (
        ("perplexity", "perplexity", 3, 1),
        ("teacher_perplexity", "perplexity of the teacher", 3, 1),
        ("kl", "KL(teacher || engine), nats/token", 5, 1),
        ("agreement", "agreement with the teacher, %", 2, 100),
    ):
        if key in documents:
            value, low, high = (scale * documents[key][part] for part in ("value", "low", "high"))
            lines.append(f"{name:<34}{value:>10.{digits}f}   {low:.{digits}f} to {high:.{digits}f}")
    return "\n".join(lines)


def plot_report(report: Report, path: Path) -> None:
    """Write exact match per task with its 95% interval, the teacher's beside it where there is one.

    Raises:
        KvforgeError: matplotlib is missing, or ``path`` cannot be plotted to.
    """
    rows = report.scores
    figure = new_figure(2 + 0.8 * len(rows), 4)
    axes = figure.subplots()
    systems = [("engine", rows)]
    if report.teacher:
        systems.insert(0, ("teacher", [row["teacher"] for row in rows]))
    for index, (name, scores) in enumerate(systems):
        places = [place + 0.2 * (index - (len(systems) - 1) / 2) for place in range(len(rows))]
        values = [100 * score["accuracy"] for score in scores]
        errors = [
            [100 * (score["accuracy"] - score["low"]) for score in scores],
            [100 * (score["high"] - score["accuracy"]) for score in scores],
        ]
        axes.errorbar(places, values, errors, fmt="o", capsize=3, label=name)
    axes.set_xticks(range(len(rows)), [row["task"] for row in rows], rotation=45, ha="right")
    axes.set(ylabel="exact match, %", ylim=(-2, 102))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)
