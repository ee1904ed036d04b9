"""The demo's questions: one number hidden in a text of 500 to 1500 tokens."""

from collections.abc import Callable

from kvforge.tasks.prompt import Example, make_examples

LENGTHS = (500, 750, 1000, 1250, 1500)
TASK = "needle_single"
MAX_ANSWER_TOKENS = 16


def make_questions(count_tokens: Callable[[str], int], num: int, seed: int) -> list[Example]:
    """`num` questions whose lengths go round LENGTHS; each length counts `<s>`."""
    per_length = -(-num // len(LENGTHS))
    by_length = [make_examples(TASK, length - 1, count_tokens, per_length, seed) for length in LENGTHS]
    return [examples[index] for index in range(per_length) for examples in by_length][:num]
