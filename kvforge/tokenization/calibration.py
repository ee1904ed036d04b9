"""Token sequences to calibrate with: a text file in pieces, or text that the project's tasks generate."""

import random
from pathlib import Path

from tokenizers import Tokenizer

from kvforge.common.errors import CheckpointError, KvforgeError, first_line
from kvforge.common.native_calls import panics_as
from kvforge.tasks.prompt import make_example
from kvforge.tokenization.files import read_tokenizer, spread_pieces, tokens_before_text

PACKAGE_TEXT = Path(__file__).with_name("texts") / "calibration.txt"
"""Texts of many kinds, written for this project, that rounding goes by where no other is given."""

CHECK_TEXT = PACKAGE_TEXT.with_name("check.txt")
"""Other ones, to compare models on."""

GENERATED_TASKS = ("needle_single", "list_recall", "variables", "needle_multi", "arithmetic")


def calibration_samples(
    checkpoint: Path, vocab_size: int, text: Path | None, num_samples: int, num_tokens: int
) -> list[list[int]]:
    """Return token ids to run a checkpoint on: pieces of the file ``text``, or generated text where it is None.

    Raises:
        CheckpointError: the checkpoint's tokenizer.json is missing, damaged, or gives tokens the model has not.
        KvforgeError: as :func:`from_file` and :func:`from_tasks` do.
    """
    tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
    if text is None:
        samples = from_tasks(tokenizer, num_samples, num_tokens)
    else:
        samples = from_file(text, tokenizer, num_samples, num_tokens)
    largest = max(max(ids) for ids in samples)
    if largest >= vocab_size:
        raise CheckpointError(
            f"The tokenizer of {checkpoint} gives token {largest}, but the model has {vocab_size}; give it the "
            "model's own tokenizer."
        )
    return samples


def from_file(path: Path, tokenizer: Tokenizer, num_samples: int, num_tokens: int) -> list[list[int]]:
    """Return up to ``num_samples`` pieces of ``num_tokens`` tokens, evenly spread over the text of ``path``.

    Every piece begins with what the tokenizer puts before a text. Raises KvforgeError when the file cannot be read
    as UTF-8 or is shorter than one piece, the tokenizer fails on it, or a piece has no room for any of it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvforgeError(f"The calibration text {path} cannot be read as UTF-8: {error}.") from None
    try:
        with panics_as(KvforgeError, f"The tokenizer fails on the calibration text {path}; give another text."):
            body = tokenizer.encode(text, add_special_tokens=False).ids
            prefix = tokens_before_text(tokenizer)
    except KvforgeError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise KvforgeError(
            f"The tokenizer fails on the calibration text {path} ({first_line(error)}); give another text."
        ) from None
    step = num_tokens - len(prefix)
    if step < 1:
        raise KvforgeError(
            f"A sample of {num_tokens} tokens has no room for text behind the {len(prefix)} tokens that the tokenizer "
            "begins with; give longer ones."
        )
    if len(body) < step:
        raise KvforgeError(
            f"The calibration text {path} has {len(body)} tokens and one sample needs {step}; give a longer text, or "
            "shorter samples where the command has --num-tokens."
        )
    return spread_pieces(prefix, body, step, num_samples)


def _reproduces(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text comes back from its tokens, up to white space at its ends."""
    decoded: str = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
    return decoded.strip() == text.strip()


def from_tasks(tokenizer: Tokenizer, num_samples: int, num_tokens: int) -> list[list[int]]:
    """Return ``num_samples`` generated prompts with their answers, each at most ``num_tokens`` tokens; seeded.

    Raises KvforgeError where the tokenizer does not reproduce the text, or no task fits into ``num_tokens``.
    """

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    samples: list[list[int]] = []
    tasks = list(GENERATED_TASKS)
    while len(samples) < num_samples:
        if not tasks:
            raise KvforgeError(f"No generated text fits into {num_tokens} tokens; give a larger --num-tokens.")
        task = tasks[len(samples) % len(tasks)]
        try:
            example = make_example(task, num_tokens - 8, count, random.Random(f"calibration/{task}/{len(samples)}"))
        except ValueError:  # too long for this tokenizer and length
            tasks.remove(task)
            continue
        text = f"{example.prompt} {example.answer}."
        ids = tokenizer.encode(text).ids[:num_tokens]
        if not samples and not _reproduces(tokenizer, text):
            raise KvforgeError(
                "This tokenizer does not reproduce the generated text; give a text of your own with --calibration."
            )
        samples.append(ids)
    return samples
