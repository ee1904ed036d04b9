"""Tables and the figure of a sweep: one row per engine and load level."""

from collections.abc import Callable, Sequence
from pathlib import Path

from perf.harness.plots import panels
from perf.harness.tables import Row


def _ms(kind: str, part: str) -> Callable[[Row], str]:
    """Return the value of a column of milliseconds, where there are any."""
    return lambda row: f"{1e3 * found:.1f}" if (found := row.get(kind, {}).get(part)) is not None else "-"


def _rate(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: format(row[name], form) if name in row else "-"


def _failed(row: Row) -> str:
    whole = "" if "ttft_s" in row else f" of {row['num_requests']}"
    return f"{row['num_incomplete']}{whole}"


COLUMNS = (
    ("engine", "engine"), ("load", lambda row: f"{row['mode']} {row['level']:g}"),
    *((title, _ms("ttft_s", part)) for title, part in (("TTFT p50", "p50"), ("p90", "p90"), ("p99", "p99"))),
    *(
        (title, _ms(kind, part))
        for kind, name in (("inter_token_s", "ITL"), ("tpot_s", "TPOT"), ("end_to_end_s", "end to end"))
        for title, part in ((f"{name} p50", "p50"), ("p99", "p99"))
    ),
    ("output tok/s", _rate("output_tok_s", ".0f")), ("combined tok/s", _rate("combined_tok_s", ".0f")),
    ("good requests/s", _rate("goodput_requests_per_s", ".2f")), ("failed", _failed),
)  # fmt: skip
"""Of a table with a line per row; times in ms."""


def plot(rows: Sequence[Row], path: Path) -> None:
    """Latency against throughput, a line per engine over its concurrency levels and one over its request rates."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    with panels(path, 11, 4, 2, legend=0, which="both") as both:
        for i, engine in enumerate(engines):
            for mode, marker in (("concurrency", "o"), ("request rate", "^")):
                line = [row for row in rows if row["engine"] == engine and row["mode"] == mode and "ttft_s" in row]
                x = [row["combined_tok_s"] for row in line]
                for panel, kind in zip(both, ("ttft_s", "tpot_s"), strict=True) if line else ():
                    for q, style in (("p50", "-"), ("p99", ":")):
                        y = [1e3 * row[kind].get(q, float("nan")) for row in line]
                        panel.plot(x, y, style, marker=marker, ms=4, color=f"C{i}", label=f"{engine}, {mode}, {q}")
                for row, value in zip(line, x, strict=True):
                    at = (value, 1e3 * row["ttft_s"]["p50"])
                    both[0].annotate(f"{row['level']:g}", at, (3, 4), textcoords="offset points", fontsize=7)
        for panel, title in zip(both, ("time to first token, ms", "time per output token, ms"), strict=True):
            panel.set(xlabel="prompt + output tokens per second", ylabel=title, yscale="log")
        both[0].legend(fontsize=7)
