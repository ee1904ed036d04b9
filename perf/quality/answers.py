"""Answers of an engine to the tasks' prompts, kept on disk so that an interrupted run continues."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from kvforge.evaluation.engine import EngineGenerator
from kvforge.tasks.prompt import Example, make_examples
from perf.harness.engines import TEACHER_DIR
from perf.quality.scores import TASKS, Cell, correct_of

CHUNK = 100


def examples_of(tasks: tuple[str, ...], tokenizer_file: Path, length: int, num: int, seed: int) -> dict[str, list]:
    """Return ``num`` prompts of ``length`` tokens of every task."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return {task: make_examples(task, length - 1, count, num, seed) for task in tasks}


def answer(
    engine: Path, examples: dict[str, list[Example]], length: int, seed: int, work: Path
) -> dict[str, list[str]]:
    """Return the engine's text for every prompt of every task, from ``work`` where it is known, else generated."""
    generator, texts = None, {}
    for task, wanted in examples.items():
        file = work / "answers" / engine.name / f"{task}-{seed}.json"
        known = json.loads(file.read_text()) if file.is_file() else []
        while len(known) < len(wanted):
            if generator is None:
                generator = EngineGenerator(engine, length, show_progress=False)
            known += generator([example.prompt for example in wanted[len(known) : len(known) + CHUNK]])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".tmp").write_text(json.dumps(known))
            file.with_suffix(".tmp").replace(file)
        texts[task] = known[: len(wanted)]
    return texts


@dataclass(frozen=True)
class Questions:
    """Prompts of every task, each ``length`` tokens, and where answers to them are kept."""

    examples: dict[str, list[Example]]
    length: int
    seed: int
    work: Path

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Questions":
        """Return those that the options of ``asking`` ask for."""
        examples = examples_of(TASKS, TEACHER_DIR / "tokenizer.json", args.length, args.num_prompts, args.seed)
        return cls(examples, args.length, args.seed, args.work)

    def ask(self, engine: Path) -> Cell:
        """Return the texts of an engine, and whether each is right."""
        texts = answer(engine, self.examples, self.length, self.seed, self.work)
        return {"texts": texts, "correct": correct_of(self.examples, texts)}
