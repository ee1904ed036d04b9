"""The table and the plot of ``perf.quality.cache_formats``."""

from pathlib import Path
from typing import Any

from perf.harness.experiment import columns_table, interval, told
from perf.harness.plots import panels
from perf.quality.cache_table import FORMATS

LLAMA_HEADS, LLAMA_DIM, LLAMA_OWNERS = 8, 128, {"no cut": 32, "cut 16, 4-way": 20}
"""KV heads, head_dim and owners of Llama-3.1-8B, whose bytes the table gives."""


def markdown(report: dict[str, Any]) -> str:
    """Return the table with its explanation."""
    by_format: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        by_format.setdefault(row["format"], {})[row["model"]] = row
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))

    def first(of_models: dict[str, Any]) -> dict[str, Any]:
        return next(iter(of_models.values()))

    def token_bytes(row: dict[str, Any], cut: str) -> str:
        end = f" + {row['residual']} exact tokens" if row["residual"] else ""
        return f"{row['llama_bytes_per_token'][cut]}{end}"

    def kl(of_models: dict[str, Any], model: str) -> str | None:
        return interval(of_models[model]["kl"], 2, kind="g") if model in of_models else None

    def same(of_models: dict[str, Any], model: str) -> float | None:
        return 100 * of_models[model]["agreement"]["value"] if model in of_models else None

    columns: list[tuple] = [("format", lambda of: first(of)["format"])]
    columns.append(("bits a number", lambda of: first(of)["bits_per_number"], ".4g"))
    columns += [(f"bytes a token, {cut}", lambda of, cut=cut: token_bytes(first(of), cut)) for cut in LLAMA_OWNERS]
    for model in models:
        columns.append((f"{model}: KL, nats a token", lambda of, model=model: kl(of, model)))
        columns.append((f"{model}: same top token, %", lambda of, model=model: same(of, model), ".2f"))
    tokens = sorted({row["num_tokens"] for row in report["rows"]})
    parts = [
        "# Formats of the KV cache, simulated",
        told(report),
        f"The tiny models in float32 on {' and '.join(map(str, tokens))} tokens of documents full of questions; KL of "
        "the exact cache's distribution to each format's, with its 95% interval over documents. Bits and bytes are "
        "those of Llama-3.1-8B (8 KV heads of 128), scales included; here heads have 64 numbers, so a scale of a head "
        "weighs twice as much and helps more. Rotated: by a Hadamard matrix over head_dim. nuq4: KVQuant's keys before "
        f"RoPE and values, its limits and levels from {report['calibration_documents']} other documents, without its "
        f"weights of sensitivity. KIVI: groups of 32, of keys along tokens; exact are a query's own 32 "
        "positions, or its 64 or 128, as pages would be. Fitted: a group's range is the best of five shares of what "
        "its numbers span.",
        columns_table(
            columns, [by_format[each] for each in FORMATS if each in by_format], "l" + "r" * len(columns[1:])
        ),
    ]
    return "\n\n".join(parts) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Bits against KL, a panel for each model."""
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    with panels(path, 5.5 * len(models), 4.6, len(models), sharey=True) as found:
        for axes, name in zip(found, models, strict=True):
            for row in (row for row in report["rows"] if row["model"] == name):
                kl, bits = row["kl"], row["bits_per_number"]
                colour = "tab:red" if "rotated" in row["format"] else "tab:blue"
                errors = [[kl["value"] - kl["low"]], [kl["high"] - kl["value"]]]
                axes.errorbar([bits], [kl["value"]], yerr=errors, fmt="o", markersize=4, capsize=2, color=colour)
                axes.annotate(row["format"], (bits, kl["value"]), (4, 3), textcoords="offset points", fontsize=6.5)
            axes.set(xscale="log", yscale="log", title=name, xlabel="bits of a number of K or V, scales included")
            axes.set_xticks([2, 3, 4, 5, 6, 8, 16], labels=["2", "3", "4", "5", "6", "8", "16"], minor=False)
            axes.minorticks_off()
        found[0].set(ylabel="KL to the exact cache, nats a token")
        found[0].figure.suptitle("Formats of the KV cache, tiny models; red: rotated; 95% intervals")
