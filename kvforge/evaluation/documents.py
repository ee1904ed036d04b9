"""Documents to measure perplexity, KL and agreement on: pieces of a text file, or generated text with answers."""

import random
from collections.abc import Callable
from pathlib import Path

from kvforge.common.errors import KvforgeError
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tasks import TASKS, filler
from kvforge.tasks.item import Item
from kvforge.tasks.prompt import count_following, question_block, scatter
from kvforge.tokenization.files import spread_pieces, tokens_before_text

GENERATED_TASKS = ("needle_single", "list_recall", "variables", "amounts", "quoting", "arithmetic")
MAX_ITEMS = 20


def text_documents(path: Path, tokenizer: Tokenizer, num: int, length: int) -> list[list[int]]:
    """Return up to ``num`` pieces of ``length`` tokens, evenly spread over the UTF-8 text of ``path``.

    Each begins with what the tokenizer puts before a text, and knows nothing of the text before it.

    Raises:
        KvforgeError: the file cannot be read, or is shorter than two pieces.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KvforgeError(f"{path} cannot be read ({error.strerror}); name a text file or 'generated'.") from None
    except UnicodeDecodeError as error:
        raise KvforgeError(f"{path} is not UTF-8 at byte {error.start}; convert it.") from None
    body = tokenizer.encode(text, add_special_tokens=False)
    prefix = tokens_before_text(tokenizer.backend)
    step = length - len(prefix)
    available = len(body) // step if step > 0 and length > 1 else 0
    if available < 2:
        raise KvforgeError(
            f"{path} has {len(body)} tokens, fewer than two documents of {length}; give a longer text or another "
            "--length."
        )
    return spread_pieces(prefix, body, step, num)


def generated_documents(tokenizer: Tokenizer, num: int, length: int, seed: int) -> list[list[int]]:
    """Return ``num`` documents of at most ``length`` tokens; the i-th depends on (tokenizer, length, seed, i) only.

    Facts of ``GENERATED_TASKS`` among filler, then the question and the answer of each, about half of the tokens.
    Raises KvforgeError where ``length`` cannot hold one.
    """
    prefix = tokens_before_text(tokenizer.backend)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    documents = []
    for index in range(num):
        text = _generate(random.Random(f"documents/{length}/{seed}/{index}"), length - len(prefix), count)
        documents.append((prefix + tokenizer.encode(text, add_special_tokens=False))[:length])
    return documents


def _generate(rng: random.Random, length: int, count: Callable[[str], int]) -> str:
    added, used = count_following(count), set[str]()
    items: list[tuple[Item, str]] = []
    room = length
    for _ in range(MAX_ITEMS):
        item = TASKS[rng.choice(GENERATED_TASKS)].sample(rng, used)
        tail = f"{question_block(item)}{item.answer}."
        cost = count(tail) + sum(added(statement) for statement in item.statements)
        if cost > room - (length // 2 if items else 0):
            break
        items.append((item, tail))
        room -= cost
    if not items:
        raise KvforgeError(f"documents of {length} tokens hold no fact and its question; give a larger --length.")
    fillers = []
    while (room := room - added(sentence := filler.sentence(rng))) >= 0:
        fillers.append(sentence)
    text = " ".join(scatter(rng, [list(item.statements) for item, _ in items], fillers))
    rng.shuffle(items)
    return text + "".join(tail for _, tail in items)
