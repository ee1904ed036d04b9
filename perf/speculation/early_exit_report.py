"""Tables and the figure of ``perf.speculation.early_exit``."""

from pathlib import Path

from kvforge.common.figures import new_figure, save_figure
from kvforge.runtime.step.self_draft import MIN_CONFIDENCE
from perf.harness.tables import Row, markdown_table


def write_report(data: dict[str, list[Row]], source: Path) -> None:
    """Write ``source`` with the endings .md and .svg."""
    parts = [
        "# Early exit at decode, tiny-swiftkv (cut 4 of 8) in bf16 on two cores",
        "Made by `python -m perf.speculation.early_exit`, whose text says how. Acceptance is of the drafts that were "
        "made; tokens per step are of one sequence; *same* are the texts equal to those of plain decoding (in bf16 "
        "near-ties of the two most probable tokens may fall the other way where more rows are computed together).",
        f"## Drafts by the early exit: up to so many, ending where its probability is below {MIN_CONFIDENCE:g}",
        markdown_table(
            (
                *("workload", "batch", "drafts", "acceptance", "tokens a step", "tokens/s", "speed-up", "same"),
                *("ms a step", "lower", "exit", "upper", "the rest"),
            ),
            [
                (row["workload"], row["batch"], row["length"], *_speed(row), f"{row['ms_per_step']:.2f}", *_phases(row))
                for row in (*data.get("draft", []), *data.get("adaptive", []))
            ],
        ),
        "## Drafts of up to 6 tokens, ending where the exit's probability is below a confidence",
        markdown_table(
            ("workload", "batch", "confidence", "acceptance", "tokens a step", "tokens/s", "speed-up", "same"),
            [
                (row["workload"], row["batch"], row.get("confidence", "no drafts"), *_speed(row))
                for row in data.get("sure", [])
            ],
        ),
        "## Exits above a threshold: speed",
        markdown_table(
            ("workload", "batch", "threshold", "share of exits", "tokens/s", "speed-up", "same texts"),
            [
                (
                    row["workload"],
                    row["batch"],
                    row["threshold"] or "off",
                    f"{100 * row['share_of_exits']:.1f}%",
                    f"{row['tokens_per_s']:.0f}",
                    f"{row['speed_up']:.2f}",
                    f"{row['same_texts']}/{row['num_texts']}",
                )
                for row in data.get("exit", [])
            ],
        ),
        "## Exits above a threshold: answers",
        markdown_table(
            ("threshold", "share of exits", "exact match", "full model's", "gained", "lost", "same answers"),
            [
                (
                    row["threshold"],
                    f"{100 * row['share_of_exits']:.1f}%",
                    f"{100 * row['exits']:.1f}%",
                    f"{100 * row['full']:.1f}%",
                    row["gained"],
                    row["lost"],
                    f"{row['same']}/{row['num_prompts']}",
                )
                for row in data.get("quality", [])
            ],
        ),
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


def _speed(row: Row) -> tuple[str, ...]:
    drafted = row["num_draft_tokens"]
    return (
        f"{100 * row['num_accepted_draft_tokens'] / drafted:.1f}%" if drafted else "",
        f"{row['tokens_per_step']:.2f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['speed_up']:.2f}",
        f"{row['same_texts']}/{row['num_texts']}",
    )


def _phases(row: Row) -> tuple[str, ...]:
    phases = [row["ms_per_step_in"].get(name, 0.0) for name in ("lower", "early_exit", "upper")]
    return tuple(f"{value:.2f}" for value in (*phases, row["ms_per_step"] - sum(phases)))
