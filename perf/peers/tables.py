"""The comparison's report as Markdown and as a figure."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvforge.common.figures import new_figure
from perf.harness.tables import Row, columns_table
from perf.peers.systems import (
    EVERY_VARIANT,
    INT4_VARIANTS,
    KV_VARIANTS,
    LLAMA_CPP,
    LLAMA_CPP_FILE,
    OPENVINO,
    OPENVINO_INT4,
    PACE,
    PEERS,
    VLLM,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def markdown(report: dict[str, Any], workloads: dict[str, str]) -> str:
    """Return the whole report; ``workloads`` maps names to descriptions."""
    rates = report["rates"]
    parts = [
        "# One sitting: kvforge and what else runs the model",
        f"`{report['command']}`, {report['machine']}.",
        "Medians over the rounds, of shares of the floor too, which are each run's own; targets are medians of ratios "
        "within a round. Within a round the systems alternate on the same prompts. Measured between the runs "
        f"(medians): bf16 GEMM {rates['bf16_gemm'] / 1e9:.0f} GFLOP/s, int8 {rates['int8_gemm'] / 1e9:.0f} GOP/s, "
        f"memory read {rates['read'] / 1e9:.1f} GB/s."
        if rates
        else "",
    ]
    for workload in dict.fromkeys(row["workload"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["workload"] == workload]
        parts.append(f"## {workload}: {workloads.get(workload, '')}")
        parts.append(workload_table(rows))
    if report["same_first_token"]:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in report["same_first_token"].items())
        parts.append(f"Requests whose first greedy token is transformers' own: {shares}.")
    if report["checks"]:
        parts += ["## Targets", check_table(report["checks"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def workload_table(rows: list[Row]) -> str:
    """One line per system; a floor stands in brackets behind the time it belongs to, then the share achieved."""
    compared = (OPENVINO, OPENVINO_INT4, LLAMA_CPP, LLAMA_CPP_FILE, VLLM, PACE)
    peers = {row["system"]: row["combined_tok_s"] for row in rows if row["system"] in compared}

    def phase(name: str, digits: int, unit: Callable[[Row], float]) -> Callable[[Row], str]:
        def shown(row: Row) -> str:
            floor = row.get(f"{name}_floor_s")
            time = f"{row[f'{name}_s'] * unit(row):.{digits}f}"
            return time if floor is None else f"{time} ({floor * unit(row):.{digits}f})"

        return shown

    columns = (
        ("system", "system"), ("rounds", "rounds"), ("tok/s", "combined_tok_s", ".0f"),
        *((f"× {name}", "combined_tok_s", ".2f", 1 / rate) for name, rate in peers.items()),
        ("TTFT s", "ttft_s", ".2f"),
        ("prefill s (floor)", phase("prefill", 2, lambda row: 1.0)), ("", "prefill_share", ".0%"),
        ("decode ms/step (floor)", phase("decode", 1, lambda row: 1e3 / max(row["decode_steps"], 1))),
        ("", "decode_share", ".0%"),
    )  # fmt: skip
    return columns_table(columns, rows)


CHECKS = (
    ("", "what"), ("workload", "workload"),
    ("target", lambda check: f"{'≤' if check['at_most'] else '≥'} {check['limit']}"),
    ("reached (rounds)", lambda check: f"{check['value']:.2f} ({check['rounds']})"),
    ("", lambda check: "pass" if check["passed"] else "**falls short**"),
)  # fmt: skip


def check_table(checks: list[Row]) -> str:
    """One line per check and workload."""
    return columns_table(CHECKS, checks)


def _color(system: str) -> str:
    if system in PEERS:
        return "tab:gray"
    return "tab:green" if system in INT4_VARIANTS else "tab:orange" if "int8" in system else "tab:blue"


def plot(report: dict[str, Any]) -> "Figure":
    """Bars of combined tok/s by workload; a mark above each is what the floors of both phases would allow."""
    workloads = list(dict.fromkeys(row["workload"] for row in report["rows"]))
    figure = new_figure(4.2 * len(workloads), 4.2)
    for index, workload in enumerate(workloads):
        axes = figure.add_subplot(1, len(workloads), index + 1)
        rows = [row for row in report["rows"] if row["workload"] == workload and row["system"] not in KV_VARIANTS]
        rows.sort(key=lambda row: [*PEERS, *EVERY_VARIANT].index(row["system"]))
        for place, row in enumerate(rows):
            axes.bar(place, row["combined_tok_s"], color=_color(row["system"]))
            if "prefill_floor_s" in row:
                floor = row["prefill_floor_s"] + row.get("decode_floor_s", 0.0)
                bound = row["combined_tok_s"] * row["total_s"] / floor
                axes.hlines(bound, place - 0.4, place + 0.4, color="black", label="floor" if place == 0 else None)
        axes.set_xticks(range(len(rows)), [row["system"] for row in rows], rotation=60, ha="right", fontsize=8)
        axes.set_title(workload)
        if index == 0:
            axes.set_ylabel("combined tokens per second; line: at the floor")
    return figure
