"""What the demo measured of one model, and the table that puts two models side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from kvforge.common.text_table import align
from kvforge.demo.streamed import StreamedRun
from kvforge.evaluation.score import is_correct
from kvforge.manifest import Manifest
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
        flops_per_token=manifest.prefill_flops_per_token(CONTEXT_LENGTH),
        kv_bytes_per_token=allocated_kv_bytes_per_token,
        tokens_per_second=run.tokens_per_second,
    )


def comparison_table(teacher: ModelReport, student: ModelReport, pairs: Sequence[tuple[float, float]]) -> str:
    """One row per quantity: teacher, student, student relative to teacher. ``pairs`` are the seconds to the first token
    that both took, by turns: of these the ratio is the median of the pairs'."""
    rows = [("", teacher.name, student.name, "ratio")]
    for label, get, form in (
        ("accuracy (exact match)", lambda r: 100 * r.accuracy, "{:.1f}%"),
        (f"prefill MFLOPs per token at {CONTEXT_LENGTH}", lambda r: r.flops_per_token / 1e6, "{:.2f}"),
        ("KV bytes per token, allocated (fp32)", lambda r: r.kv_bytes_per_token, "{:.0f}"),
        ("prompt + output tokens per s", lambda r: r.tokens_per_second, "{:.0f}"),
    ):
        a, b = get(teacher), get(student)
        rows.append((label, form.format(a), form.format(b), f"{b / a:.2f}" if a else "-"))
    first, second = (median(column) for column in zip(*pairs, strict=True))
    ratio = f"{median(_ratios(pairs)):.2f}"
    rows.append(("time to first token alone, median ms", f"{1e3 * first:.0f}", f"{1e3 * second:.0f}", ratio))
    head, *lines = align(rows).splitlines()
    return "\n".join([head, "-" * len(head), *lines])


def note_of_load(load: float, num_cores: int) -> str:
    """What to say of times where ``load`` was the machine's before the demo began; nothing where it was idle."""
    if load <= BUSY * num_cores:
        return ""
    return f"The machine was busy before the demo began (load {load:.1f}): these times and rates say little."


def note_of_pairs(pairs: Sequence[tuple[float, float]]) -> str:
    """What to say of times to the first token where the middle half of the pairs does not tell which model is sooner;
    nothing where it does."""
    low, _, high = quantiles(_ratios(pairs), n=4, method="inclusive")
    if high < 1 or low > 1:
        return ""
    return (
        f"The middle half of {len(pairs)} pairs of times to the first token has ratios from {low:.2f} to {high:.2f}: "
        "on this machine, now, they do not tell which model is sooner."
    )


def _ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [student / teacher for teacher, student in pairs]
