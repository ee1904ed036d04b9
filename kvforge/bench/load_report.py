"""What ``kvforge bench`` shows of a server under load: lines for each level, and a figure of a sweep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure

_COUNTS = (
    ("Successful requests", "completed", ""),
    ("Failed requests", "failed", ""),
    ("Answers shorter than asked for", "short", ""),
    ("Request rate configured (req/s)", "request_rate", ""),
    ("Maximum concurrency configured", "max_concurrency", ""),
    ("Peak concurrent requests", "max_concurrent_requests", ""),
    ("Benchmark duration (s)", "duration", ".2f"),
    ("Total input tokens", "total_input_tokens", ""),
    ("Total generated tokens", "total_output_tokens", ""),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Request goodput (req/s)", "request_goodput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".2f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".2f"),
)
_TIMES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
          "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}  # fmt: skip


def text_of(numbers: dict[str, Any]) -> str:
    """The lines of one level, as ``vllm bench serve`` has them."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines += [_line(title, numbers[key], form) for title, key, form in _COUNTS if numbers.get(key) is not None]
    for kind, title in _TIMES.items():
        if f"mean_{kind}_ms" in numbers:
            lines.append(f"{f' {title} ':-^50}")
            for name in ("mean", "median", "p90", "p99"):
                shown = name.upper() if name[0] == "p" else name.title()
                lines.append(_line(f"{shown} {kind.upper()} (ms)", numbers[f"{name}_{kind}_ms"], ".2f"))
    return "\n".join([*lines, "=" * 50])


def plot(levels: Sequence[dict[str, Any]], path: Path) -> None:
    """Throughput and latencies over the load; raises KvforgeError."""
    key = "request_rate" if len({level["request_rate"] for level in levels}) > 1 else "max_concurrency"
    label = "requests a second" if key == "request_rate" else "requests at a time"
    figure, places = new_figure(11, 3.5), range(len(levels))
    panels = {"tokens a second": ("output_throughput", "total_token_throughput"),
              "TTFT, ms": ("median_ttft_ms", "p99_ttft_ms"), "TPOT, ms": ("median_tpot_ms", "p99_tpot_ms")}  # fmt: skip
    for panel, title in zip(figure.subplots(1, 3), panels, strict=True):
        for name in panels[title]:
            panel.plot(places, [level.get(name, float("nan")) for level in levels], marker="o", label=name)
        panel.set(xlabel=label, ylabel=title, ylim=(0, None), xticks=places)
        panel.set_xticklabels([str(level[key]) for level in levels])
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def _line(title: str, value: Any, form: str) -> str:
    return f"{f'{title}:':<40} {format(value, form):<9}".rstrip()
