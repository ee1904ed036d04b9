"""What leaving at the early exit costs in answers: the same prompts with and without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvforge.evaluation.engine import AnsweredPrompt, EngineGenerator
from kvforge.evaluation.paired import PairedDifference, paired_difference
from kvforge.evaluation.score import is_correct
from kvforge.tasks.prompt import Example


@dataclass(frozen=True)
class TaskExits:
    """Exact matches of one task in 0..1, ``full`` without exits and ``exits`` with them; of ``num_tokens`` generated
    tokens ``num_exits`` took the exit's logits, ``num_prompt_exits`` of them the first of their answer, and
    ``num_same`` answers are the same token for token."""

    task: str
    full: float
    exits: float
    paired: PairedDifference
    num_same: int
    num_tokens: int
    num_exits: int
    num_prompt_exits: int


@dataclass(frozen=True)
class ExitQuality:
    """Answers of an engine whose generated tokens exit above ``threshold``, and with ``prompts`` the last tokens of
    prompts too, against those of its full model."""

    threshold: float
    prompts: bool
    tasks: tuple[TaskExits, ...]

    @property
    def share(self) -> float:
        """The share of generated tokens that are an exit's."""
        return sum(row.num_exits for row in self.tasks) / max(sum(row.num_tokens for row in self.tasks), 1)

    @property
    def prompt_share(self) -> float:
        """The share of prompts whose last token exits."""
        return sum(row.num_prompt_exits for row in self.tasks) / sum(row.paired.num_prompts for row in self.tasks)


@dataclass(frozen=True)
class ExitAnswers:
    """What an engine answered with exits, by task, and how many rows took the exit's logits: (all, of prompts)."""

    threshold: float
    prompts: bool
    answers: dict[str, list[AnsweredPrompt]]
    num_exits: dict[str, tuple[int, int]]


def answer_with_exits(
    engine: Path,
    threshold: float,
    length: int,
    examples: Mapping[str, Sequence[Example]],
    *,
    prompts: bool = False,
    use_tqdm: bool = False,
) -> ExitAnswers:
    """Answer the prompts of each task with exits above ``threshold``, with ``prompts`` of the last tokens of prompts
    too.

    Raises:
        KvforgeError: the engine has no early exit, ``threshold`` is no probability, or an answer fails.
    """
    generator = EngineGenerator(
        engine, length, show_progress=use_tqdm, early_exit_threshold=threshold, early_exit_prompts=prompts
    )
    answers, num_exits = dict[str, list[AnsweredPrompt]](), dict[str, tuple[int, int]]()
    for task, wanted in examples.items():
        before = generator.llm.engine.stats()
        answers[task] = generator.answer([example.prompt for example in wanted])
        after = generator.llm.engine.stats()
        count, of_prompts = (after[name] - before[name] for name in ("num_early_exits", "num_prompt_early_exits"))
        num_exits[task] = count, of_prompts
    return ExitAnswers(threshold, prompts, answers, num_exits)


def exit_quality(
    examples: Mapping[str, Sequence[Example]], answers: Mapping[str, Sequence[AnsweredPrompt]], exits: ExitAnswers
) -> ExitQuality:
    """Compare answers with exits to ``answers``, the full model's, prompt by prompt."""
    rows = []
    for task, wanted in examples.items():
        full, found = answers[task], exits.answers[task]
        right = [[is_correct(e, a.text) for e, a in zip(wanted, said, strict=True)] for said in (full, found)]
        rows.append(
            TaskExits(
                task,
                sum(right[0]) / len(wanted),
                sum(right[1]) / len(wanted),
                paired_difference(*right),
                sum(one.token_ids == other.token_ids for one, other in zip(full, found, strict=True)),
                sum(len(answer.token_ids) for answer in found),
                *exits.num_exits[task],
            )
        )
    return ExitQuality(exits.threshold, exits.prompts, tuple(rows))


def exit_table(quality: ExitQuality) -> str:
    """A text table, one row per task, in per cent: exact match without and with exits, the paired difference with its
    interval, answers that are the same, the share of tokens that exit, and of prompts where these may."""
    head = f"tokens exit above {quality.threshold:g}: {100 * quality.share:.1f}% of those generated"
    if quality.prompts:
        head += f"; prompts too: {100 * quality.prompt_share:.1f}% of them"
    lines = [
        head,
        f"{'task':<15}{'full':>8}{'exits':>8}{'difference':>12}   {'95% interval':<16}{'same':>8}{'exit':>8}"
        + f"{'prompts':>9}" * quality.prompts,
    ]
    for row in quality.tasks:
        interval = f"{100 * row.paired.low:+.1f} to {100 * row.paired.high:+.1f}"
        of_prompts = f"{100 * row.num_prompt_exits / row.paired.num_prompts:>8.1f}%" if quality.prompts else ""
        lines.append(
            f"{row.task:<15}{100 * row.full:>7.1f}%{100 * row.exits:>7.1f}%{100 * row.paired.difference:>+12.1f}   "
            f"{interval:<16}{100 * row.num_same / row.paired.num_prompts:>7.1f}%"
            f"{100 * row.num_exits / max(row.num_tokens, 1):>7.1f}%{of_prompts}"
        )
    return "\n".join(lines)
