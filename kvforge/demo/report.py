"""What the demo measured of one model, and the table that puts two models side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvforge.demo.streaming import StreamedRun
from kvforge.evaluation.score import is_correct
from kvforge.manifest import Manifest
from kvforge.planning.shape import prefill_flops_per_token
from kvforge.tasks.prompt import Example

CONTEXT_LENGTH = 1000


BUSY = 0.75
"""Load of a core from which on a machine's other work shows in times."""


@dataclass(frozen=True)
class ModelReport:
    """`accuracy` in 0..1; `kv_bytes_per_token` is what the engine's pools take up per token they hold."""

    name: str
    accuracy: float
    num_different_offline: int
    flops_per_token: float
    kv_bytes_per_token: float
    median_ttft_s: float
    tokens_per_second: float


def make_report(
    name: str,
    manifest: Manifest,
    allocated_kv_bytes_per_token: float,
    questions: Sequence[Example],
    run: StreamedRun,
    offline_texts: Sequence[str],
) -> ModelReport:
    """`offline_texts` are the answers of the same engine without a server."""
    texts = [answer.text for answer in run.answers]
    return ModelReport(
        name=name,
        accuracy=sum(map(is_correct, questions, texts)) / len(questions),
        num_different_offline=sum(a != b for a, b in zip(texts, offline_texts, strict=True)),
        flops_per_token=prefill_flops_per_token(manifest, CONTEXT_LENGTH),
        kv_bytes_per_token=allocated_kv_bytes_per_token,
        median_ttft_s=median(answer.ttft_s for answer in run.answers),
        tokens_per_second=run.tokens_per_second,
    )


def comparison_table(teacher: ModelReport, student: ModelReport) -> str:
    """One row per quantity: teacher, student, student relative to teacher."""
    rows = [("", teacher.name, student.name, "ratio")]
    for label, get, form in (
        ("accuracy (exact match)", lambda r: 100 * r.accuracy, "{:.1f}%"),
        (f"prefill MFLOPs per token at {CONTEXT_LENGTH}", lambda r: r.flops_per_token / 1e6, "{:.2f}"),
        ("KV bytes per token, allocated (fp32)", lambda r: r.kv_bytes_per_token, "{:.0f}"),
        ("time to first token, median ms", lambda r: 1e3 * r.median_ttft_s, "{:.0f}"),
        ("prompt + output tokens per s", lambda r: r.tokens_per_second, "{:.0f}"),
    ):
        a, b = get(teacher), get(student)
        rows.append((label, form.format(a), form.format(b), f"{b / a:.2f}" if a else "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [_aligned(row, widths) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def note_of_load(load: float, num_cores: int) -> str:
    """What to say of times where ``load`` was the machine's before the demo began; nothing where it was idle."""
    if load <= BUSY * num_cores:
        return ""
    return f"The machine was busy before the demo began (load {load:.1f}): these times and rates say little."


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    return "  ".join([row[0].ljust(widths[0]), *cells[1:]])
