"""Tables and the figure of ``perf.speculation.early_exit``."""

from pathlib import Path

from kvforge.common.figures import new_figure, save_figure
from kvforge.runtime.step.self_draft import MIN_CONFIDENCE
from perf.harness.tables import Row, columns_table


def phase(name: str) -> tuple:
    """Return the column of a graph's milliseconds."""
    return name.split("_")[-1], lambda row: row["ms_per_step_in"].get(name, 0.0), ".2f"


def _rest(row: Row) -> float:
    phases = (row["ms_per_step_in"].get(name, 0.0) for name in ("lower", "early_exit", "upper"))
    return row["ms_per_step"] - sum(phases)


def _acceptance(row: Row) -> str:
    drafted = row["num_draft_tokens"]
    return f"{100 * row['num_accepted_draft_tokens'] / drafted:.1f}%" if drafted else ""


CASE = (("workload", "workload"), ("batch", "batch"))
SPEED = (
    ("acceptance", _acceptance), ("tokens a step", "tokens_per_step", ".2f"), ("tokens/s", "tokens_per_s", ".0f"),
    ("speed-up", "speed_up", ".2f"), ("same", lambda row: f"{row['same_texts']}/{row['num_texts']}"),
)  # fmt: skip
DRAFTS = (
    *CASE, ("drafts", "length"), *SPEED, ("ms a step", "ms_per_step", ".2f"),
    *map(phase, ("lower", "early_exit", "upper")), ("the rest", _rest, ".2f"),
)  # fmt: skip
SURE = (*CASE, ("confidence", lambda row: row.get("confidence", "no drafts")), *SPEED)
SHARE = ("share of exits", "share_of_exits", "{:.1f}%", 100)
EXITS = (*CASE, ("threshold", lambda row: row["threshold"] or "off"), SHARE, *SPEED[2:4], ("same texts", *SPEED[4][1:]))
ANSWERS = (
    ("threshold", "threshold"), SHARE, ("exact match", "exits", "{:.1f}%", 100),
    ("full model's", "full", "{:.1f}%", 100),
    ("gained", "gained"), ("lost", "lost"), ("same answers", lambda row: f"{row['same']}/{row['num_prompts']}"),
)  # fmt: skip


def write_report(data: dict[str, list[Row]], source: Path) -> None:
    """Write ``source`` with the endings .md and .svg."""
    parts = [
        "# Early exit at decode, tiny-swiftkv (cut 4 of 8) in bf16 on two cores",
        "Made by `python -m perf.speculation.early_exit`, whose text says how. Acceptance is of the drafts that were "
        "made; tokens per step are of one sequence; *same* are the texts equal to those of plain decoding (in bf16 "
        "near-ties of the two most probable tokens may fall the other way where more rows are computed together).",
        f"## Drafts by the early exit: up to so many, ending where its probability is below {MIN_CONFIDENCE:g}",
        columns_table(DRAFTS, [*data.get("draft", []), *data.get("adaptive", [])]),
        "## Drafts of up to 6 tokens, ending where the exit's probability is below a confidence",
        columns_table(SURE, data.get("sure", [])),
        "## Exits above a threshold: speed",
        columns_table(EXITS, data.get("exit", [])),
        "## Exits above a threshold: answers",
        columns_table(ANSWERS, data.get("quality", [])),
    ]
    source.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    plot(data, source.with_suffix(".svg"))


def plot(data: dict[str, list[Row]], path: Path) -> None:
    """Speed-up over the draft length, and over the exit threshold with the exact match."""
    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in data.get("draft", []):
        groups.setdefault((row["workload"], row["batch"]), []).append(row)
    for (workload, batch), rows in groups.items():
        style = {"answers": "-o", "text": "--s", "sampled text": ":^"}[workload]
        lengths, speed = [row["length"] for row in rows], [row["speed_up"] for row in rows]
        left.plot(lengths, speed, style, ms=4, label=f"{workload}, batch {batch}")
    left.axhline(1, color="grey", lw=0.8)
    left.set(xlabel="drafts a step", ylabel="tokens/s against plain decoding")
    left.legend(fontsize=7)
    for batch in sorted({row["batch"] for row in data.get("exit", [])}):
        rows = [r for r in data["exit"] if r["batch"] == batch and r["workload"] == "answers" and r["threshold"]]
        right.plot([r["threshold"] for r in rows], [r["speed_up"] for r in rows], "-o", label=f"speed, batch {batch}")
    quality = data.get("quality", [])
    if quality:
        thresholds = [row["threshold"] for row in quality]
        right.plot(thresholds, [row["exits"] / row["full"] for row in quality], "k--", label="exact match")
        right.plot(thresholds, [row["share_of_exits"] for row in quality], "k:", label="share of exits")
    right.set(xlabel="exit threshold", ylabel="of the full model's")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    save_figure(figure, path)
