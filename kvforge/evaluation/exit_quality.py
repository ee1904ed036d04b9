"""What leaving at the early exit costs in answers: the same prompts with and without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvforge.evaluation.engine import Answer, EngineGenerator
from kvforge.evaluation.paired import PairedDifference, paired_difference
from kvforge.evaluation.score import is_correct
from kvforge.tasks.prompt import Example


@dataclass(frozen=True)
class TaskExits:
    """Exact matches of one task in 0..1, ``full`` without exits and ``exits`` with them; of ``num_tokens`` generated
    tokens ``num_exits`` took the exit's logits, and ``num_same`` answers are the same token for token."""

    task: str
    full: float
    exits: float
    paired: PairedDifference
    num_same: int
    num_tokens: int
    num_exits: int


@dataclass(frozen=True)
class ExitQuality:
    """Answers of an engine whose generated tokens exit above ``threshold``, against those of its full model."""

    threshold: float
    tasks: tuple[TaskExits, ...]

    @property
    def share(self) -> float:
        """The share of generated tokens that exit."""
        return sum(row.num_exits for row in self.tasks) / max(sum(row.num_tokens for row in self.tasks), 1)


def exit_quality(
    engine: Path,
    threshold: float,
    length: int,
    examples: Mapping[str, Sequence[Example]],
    answers: Mapping[str, Sequence[Answer]],
    *,
    use_tqdm: bool = False,
) -> ExitQuality:
    """Answer the prompts of each task again, with exits above ``threshold``; ``answers`` are the full model's.

    Raises:
        KvforgeError: the engine has no early exit, ``threshold`` is no probability, or an answer fails.
    """
    generator = EngineGenerator(engine, length, show_progress=use_tqdm, early_exit_threshold=threshold)
    rows = []
    for task, wanted in examples.items():
        before = generator.llm.engine.stats()["num_early_exits"]
        found, full = generator.answer([example.prompt for example in wanted]), answers[task]
        right = [[is_correct(e, a.text) for e, a in zip(wanted, said, strict=True)] for said in (full, found)]
        rows.append(
            TaskExits(
                task,
                sum(right[0]) / len(wanted),
                sum(right[1]) / len(wanted),
                paired_difference(*right),
                sum(one.token_ids == other.token_ids for one, other in zip(full, found, strict=True)),
                sum(len(answer.token_ids) for answer in found),
                generator.llm.engine.stats()["num_early_exits"] - before,
            )
        )
    return ExitQuality(threshold, tuple(rows))


def exit_table(quality: ExitQuality) -> str:
    """A text table, one row per task, in per cent: exact match without and with exits, the paired difference with its
    interval, answers that are the same, and the share of tokens that exit."""
    lines = [
        f"tokens exit above {quality.threshold:g}: {100 * quality.share:.1f}% of those generated",
        f"{'task':<15}{'full':>8}{'exits':>8}{'difference':>12}   {'95% interval':<16}{'same':>8}{'exit':>8}",
    ]
    for row in quality.tasks:
        interval = f"{100 * row.paired.low:+.1f} to {100 * row.paired.high:+.1f}"
        lines.append(
            f"{row.task:<15}{100 * row.full:>7.1f}%{100 * row.exits:>7.1f}%{100 * row.paired.difference:>+12.1f}   "
            f"{interval:<16}{100 * row.num_same / row.paired.num_prompts:>7.1f}%"
            f"{100 * row.num_exits / max(row.num_tokens, 1):>7.1f}%"
        )
    return "\n".join(lines)
