"""Tables and the figure of a sweep: one row per engine and load level."""

from collections.abc import Sequence
from pathlib import Path

from kvforge.common.figures import new_figure, save_figure
from perf.harness.tables import Row, markdown_table


def describe_level(row: Row) -> str:
    """How the load of a row was offered."""
    return f"{row['mode']} {row['level']:g}"


def markdown(rows: Sequence[Row]) -> str:
    """One line per row; times in ms."""
    head = ("engine", "load", "TTFT p50", "p90", "p99", "ITL p50", "p99", "TPOT p50", "p99", "end to end p50", "p99")
    lines = []
    for row in rows:
        name = [row["engine"], describe_level(row)]
        if "ttft_s" not in row:
            lines.append([*name, *"-" * 12, f"{row['num_incomplete']} of {row['num_requests']}"])
            continue
        times = [row["ttft_s"].get(key) for key in ("p50", "p90", "p99")]
        for kind in ("inter_token_s", "tpot_s", "end_to_end_s"):
            times += [row[kind].get("p50"), row[kind].get("p99")]
        cells = ["-" if value is None else f"{1e3 * value:.1f}" for value in times]
        cells += [f"{row['output_tok_s']:.0f}", f"{row['combined_tok_s']:.0f}", f"{row['goodput_requests_per_s']:.2f}"]
        lines.append([*name, *cells, row["num_incomplete"]])
    return markdown_table([*head, "output tok/s", "combined tok/s", "good requests/s", "failed"], lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Latency against throughput, a line per engine over its concurrency levels and one over its request rates."""
    figure = new_figure(11, 4)
    panels = figure.subplots(1, 2)
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    for i, engine in enumerate(engines):
        for mode, marker in (("concurrency", "o"), ("request rate", "^")):
            line = [row for row in rows if row["engine"] == engine and row["mode"] == mode and "ttft_s" in row]
            if not line:
                continue
            x = [row["combined_tok_s"] for row in line]
            for panel, kind in zip(panels, ("ttft_s", "tpot_s"), strict=True):
                for q, style in (("p50", "-"), ("p99", ":")):
                    y = [1e3 * row[kind].get(q, float("nan")) for row in line]
                    panel.plot(x, y, style, marker=marker, ms=4, color=f"C{i}", label=f"{engine}, {mode}, {q}")
            for row, value in zip(line, x, strict=True):
                height = 1e3 * row["ttft_s"]["p50"]
                panels[0].annotate(f"{row['level']:g}", (value, height), (3, 4), textcoords="offset points", fontsize=7)
    for panel, title in zip(panels, ("time to first token, ms", "time per output token, ms"), strict=True):
        panel.set(xlabel="prompt + output tokens per second", ylabel=title, yscale="log")
        panel.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=7)
    save_figure(figure, path)
