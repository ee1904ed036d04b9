"""The table and the plot of ``perf.quality.cache_formats``."""

from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness.tables import markdown_table
from perf.quality.cache_table import FORMATS

LLAMA_HEADS, LLAMA_DIM, LLAMA_OWNERS = 8, 128, {"no cut": 32, "cut 16, 4-way": 20}
"""KV heads, head_dim and owners of Llama-3.1-8B, whose bytes the table gives."""


def markdown(report: dict[str, Any]) -> str:
    """Return the table with its explanation."""
    by_format: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        by_format.setdefault(row["format"], {})[row["model"]] = row
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    head = ["format", "bits a number", *(f"bytes a token, {cut}" for cut in LLAMA_OWNERS)]
    head += [f"{name}: {what}" for name in models for what in ("KL, nats a token", "same top token, %")]
    table = []
    for name in (each for each in FORMATS if each in by_format):
        first = next(iter(by_format[name].values()))
        end = f" + {first['residual']} exact tokens" if first["residual"] else ""
        cells = [name, f"{first['bits_per_number']:.4g}", *first["llama_bytes_per_token"].values()]
        cells[2:] = [f"{value}{end}" for value in cells[2:]]
        for row in (by_format[name].get(model) for model in models):
            cells += ["", ""] if row is None else [_number(row["kl"]), f"{100 * row['agreement']['value']:.2f}"]
        table.append(cells)
    tokens = sorted({row["num_tokens"] for row in report["rows"]})
    lines = [
        "# Formats of the KV cache, simulated",
        "",
        f"The tiny models in float32 on {' and '.join(map(str, tokens))} tokens of documents full of questions; KL of "
        "the exact cache's distribution to each format's, with its 95% interval over documents. Bits and bytes are "
        "those of Llama-3.1-8B (8 KV heads of 128), scales included; here heads have 64 numbers, so a scale of a head "
        "weighs twice as much and helps more. Rotated: by a Hadamard matrix over head_dim. nuq4: KVQuant's keys before "
        f"RoPE and values, its limits and levels from {report['calibration_documents']} other documents, without its "
        f"weights of sensitivity. KIVI: groups of 32, of keys along tokens; exact are a query's own 32 "
        "positions, or its 64 or 128, as pages would be. Fitted: a group's range is the best of five shares of what "
        f"its numbers span. {report['machine']}.",
        "",
        f"`{report['command']}`",
        "",
        markdown_table(head, table, "l" + "r" * (len(head) - 1)),
    ]
    return "\n".join(lines) + "\n"


def _number(kl: dict[str, float]) -> str:
    return f"{kl['value']:.2g} ({kl['low']:.2g} to {kl['high']:.2g})"


def plot(report: dict[str, Any], path: Path) -> None:
    """Bits against KL, a panel for each model."""
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    figure = new_figure(5.5 * len(models), 4.6)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, models, strict=True):
        for row in (row for row in report["rows"] if row["model"] == name):
            kl, bits = row["kl"], row["bits_per_number"]
            colour = "tab:red" if "rotated" in row["format"] else "tab:blue"
            errors = [[kl["value"] - kl["low"]], [kl["high"] - kl["value"]]]
            axes.errorbar([bits], [kl["value"]], yerr=errors, fmt="o", markersize=4, capsize=2, color=colour)
            axes.annotate(row["format"], (bits, kl["value"]), (4, 3), textcoords="offset points", fontsize=6.5)
        axes.set(xscale="log", yscale="log", title=name, xlabel="bits of a number of K or V, scales included")
        axes.set_xticks([2, 3, 4, 5, 6, 8, 16], labels=["2", "3", "4", "5", "6", "8", "16"], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="KL to the exact cache, nats a token")
    figure.suptitle("Formats of the KV cache, tiny models; red: rotated; 95% intervals")
    save_figure(figure, path)
