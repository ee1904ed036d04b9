"""The comparison's report as Markdown and as a figure."""

from typing import TYPE_CHECKING, Any

from kvforge.common.figures import new_figure
from perf.harness.tables import Row, markdown_table
from perf.peers.systems import (
    EVERY_VARIANT,
    INT4_VARIANTS,
    KV_VARIANTS,
    LLAMA_CPP,
    LLAMA_CPP_FILE,
    OPENVINO,
    OPENVINO_INT4,
    PEERS,
    VLLM,
)

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
    compared = (OPENVINO, OPENVINO_INT4, LLAMA_CPP, LLAMA_CPP_FILE, VLLM)
    peers = {row["system"]: row["combined_tok_s"] for row in rows if row["system"] in compared}
    lines = []
    for row in rows:
        ratios = [f"{row['combined_tok_s'] / rate:.2f}" for rate in peers.values()]
        cells = [row["system"], row["rounds"], f"{row['combined_tok_s']:.0f}", *ratios, f"{row['ttft_s']:.2f}"]
        cells += _phase(row, "prefill", 1.0, 2) + _phase(row, "decode", 1e3 / max(row["decode_steps"], 1), 1)
        lines.append(cells)
    head = ["system", "rounds", "tok/s", *(f"× {name}" for name in peers), "TTFT s", "prefill s (floor)", ""]
    return markdown_table([*head, "decode ms/step (floor)", ""], lines)


def _phase(row: Row, phase: str, unit: float, digits: int) -> list[str]:
    time = f"{row[f'{phase}_s'] * unit:.{digits}f}"
    if f"{phase}_floor_s" not in row:
        return [time, ""]
    return [f"{time} ({row[f'{phase}_floor_s'] * unit:.{digits}f})", f"{row[f'{phase}_share']:.0%}"]


def check_table(checks: list[Row]) -> str:
    """One line per check and workload."""
    lines = []
    for check in checks:
        sign = "≤" if check["at_most"] else "≥"
        shown, verdict = f"{check['value']:.2f} ({check['rounds']})", "pass" if check["passed"] else "**falls short**"
        lines.append([check["what"], check["workload"], f"{sign} {check['limit']}", shown, verdict])
    return markdown_table(["", "workload", "target", "reached (rounds)", ""], lines)


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
