"""Every generator: deterministic, of the right length, with an answer an independent reader finds."""

import random
import re
from collections import Counter

import pytest

from kvforge.tasks import TASKS, filler, words
from kvforge.tasks.chains import HOPS
from kvforge.tasks.prompt import Example, make_example, make_examples
from tests.support.models.text_tokenizers import byte_fallback

LENGTHS = (300, 1000)


def count_words(text: str) -> int:
    """A stand-in tokenizer: words, digits and punctuation marks."""
    return len(re.findall(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]|\n", text))


def solve_needle(text: str, question: str) -> str:
    place = re.fullmatch(r"What is the secret number of the (\w+ \w+)\?", question)[1]
    (number,) = re.findall(rf"The secret number of the {place} is (\d+)\.", text)
    return number


def solve_variables(text: str, question: str) -> str:
    name = re.fullmatch(r"How many coins does (\w+) have\?", question)[1]
    while same := re.search(rf"\b{name} has the same as (\w+)\.", text):
        name = same[1]
    return re.search(rf"\b{name} has (\d+ coins)\.", text)[1]


def solve_amounts(text: str, question: str) -> str:
    name = re.fullmatch(r"How many coins does (\w+) have\?", question)[1]
    (amount,) = re.findall(rf"\b{name} has (\d+ coins)\.", text)
    return amount


def solve_quoting(text: str, question: str) -> str:
    name = re.fullmatch(r"What did (\w+) say\?", question)[1]
    return re.search(rf'\b{name} said (".*?")\.', text)[1]


def solve_list(text: str, question: str) -> str:
    place = re.fullmatch(r"Which things are in the (\w+ \w+)\?", question)[1]
    return re.search(rf"The things in the {place} are (.*?)\.", text)[1]


def solve_arithmetic(text: str, question: str) -> str:
    a, word, b = re.fullmatch(r"What is (\d+) (plus|minus) (\d+)\?", question).groups()
    return str(int(a) + int(b) if word == "plus" else int(a) - int(b))


def solve_values(text: str, question: str) -> str:
    key = re.fullmatch(r"What are all three secret numbers of the (\w+ \w+), in order\?", question)[1]
    numbers = re.findall(rf"A secret number of the {key} is (\d+)\.", text)
    assert len(numbers) == 3
    return ", ".join(numbers)


def solve_queries(text: str, question: str) -> str:
    names = re.fullmatch(r"What are the secret numbers of (\w+), (\w+) and (\w+)\?", question).groups()
    found = [re.findall(rf"The secret number of {name} is (\d+)\.", text) for name in names]
    return ", ".join(number for (number,) in found)


def solve_common_words(text: str, question: str) -> str:
    assert question == "Which three words are most frequent in the list, in alphabetical order?"
    listed = ", ".join(re.findall(r"The list goes on with (.*?)\.", text)).split(", ")
    counts = Counter(listed).most_common()
    assert counts[2][1] > counts[3][1], "the answer is not unique"
    return ", ".join(sorted(word for word, _ in counts[:3]))


def solve_single_question(text: str, question: str) -> str:
    if match := re.fullmatch(r"Where does (\w+) live\?", question):
        (answer,) = re.findall(rf"{match[1]} lives in the (\w+ \w+)\.", text)
    elif match := re.fullmatch(r"Who is the best friend of (\w+)\?", question):
        (answer,) = re.findall(rf"The best friend of {match[1]} is (\w+)\.", text)
    else:
        match = re.fullmatch(r"What does (\w+) collect\?", question)
        (answer,) = re.findall(rf"{match[1]} collects every (\w+)\.", text)
    return answer


def solve_two_hop(text: str, question: str) -> str:
    name = re.fullmatch(r"Who owns the home of (\w+)\?", question)[1]
    (home,) = re.findall(rf"\b{name} lives in the (\w+ \w+)\.", text)
    (owner,) = re.findall(rf"The {home} belongs to (\w+)\.", text)
    return owner


SOLVERS = {
    "needle_single": solve_needle,
    "needle_multi": solve_needle,
    "variables": solve_variables,
    "quoting": solve_quoting,
    "list_recall": solve_list,
    "arithmetic": solve_arithmetic,
    "amounts": solve_amounts,
    "needle_values": solve_values,
    "needle_queries": solve_queries,
    "common_words": solve_common_words,
    "qa_single": solve_single_question,
    "qa_two_hop": solve_two_hop,
    **{f"chain_{hops}": solve_variables for hops in HOPS},
}


def split(example: Example) -> tuple[str, str, str]:
    """Text, question and the start of the answer line."""
    text, question, answer = example.prompt.split("\n")
    return text, question.removeprefix("Question: "), answer.removeprefix("Answer: ")


def test_every_task_has_a_solver():
    assert set(SOLVERS) == set(TASKS)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_answer_is_what_an_independent_reader_finds(task, length):
    for example in make_examples(task, length, count_words, 50, seed=7):
        text, question, _ = split(example)
        assert SOLVERS[task](text, question) == example.answer


@pytest.mark.parametrize("task", TASKS)
def test_answer_is_not_given_away_after_the_text(task):
    for example in make_examples(task, 300, count_words, 50, seed=3):
        _, question, lead = split(example)
        assert f"{lead} {example.answer}" not in question
        assert not lead.endswith(" ")
        assert not set(example.answer) & set(".\n")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_length_is_within_one_sentence(task, length):
    for example in make_examples(task, length, count_words, 20, seed=0):
        assert length - 14 <= count_words(example.prompt) <= length


@pytest.mark.parametrize("task", TASKS)
def test_a_mark_before_every_text_does_not_shorten_prompts(task):
    """Tokenizers of the SentencePiece kind begin every text that they are given with a mark."""
    tokenizer = byte_fallback()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for example in make_examples(task, 2000, count, 3, seed=0):
        assert 2000 - 70 <= count(example.prompt) <= 2000, "short of it by more than a filler sentence, of bytes here"


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_prompts_and_a_shorter_run_is_a_prefix(task):
    ten = make_examples(task, 300, count_words, 10, seed=5)
    assert make_examples(task, 300, count_words, 4, seed=5) == ten[:4]
    assert make_examples(task, 300, count_words, 10, seed=6) != ten
    assert len({example.prompt for example in ten}) == 10


def test_multi_key_prompts_hold_eight_needles_of_different_places():
    for example in make_examples("needle_multi", 400, count_words, 20, seed=1):
        places = re.findall(r"The secret number of the (\w+ \w+) is \d{4}\.", example.prompt)
        assert len(places) == len(set(places)) == 8


def test_facts_land_everywhere_in_the_text():
    depths = []
    for example in make_examples("needle_single", 500, count_words, 100, seed=0):
        text = example.prompt.split("\n")[0]
        depths.append(text.index("The secret number") / len(text))
    assert min(depths) < 0.1 < 0.9 < max(depths)


def test_a_chain_is_told_in_order():
    for example in make_examples("variables", 300, count_words, 50, seed=2):
        known = set()
        for name, amount, source in re.findall(r"(\w+) has (?:(\d+) coins|the same as (\w+))\.", example.prompt):
            assert amount or source in known
            known.add(name)


def test_too_short_a_length_is_refused():
    with pytest.raises(ValueError, match="too short"):
        make_example("needle_multi", 50, count_words, random.Random(0))


def test_filler_holds_no_digits_and_no_vocabulary_of_the_facts():
    rng = random.Random(0)
    text = " ".join(filler.sentence(rng) for _ in range(2000))
    assert not re.search(r"\d", text)
    assert not set(re.findall(r"\w+", text)) & {*words.NOUNS, *words.NAMES, *words.ITEMS}


@pytest.mark.parametrize("group", [words.ADJECTIVES, words.NOUNS, words.NAMES, words.ITEMS])
def test_words_are_distinct_and_plain(group):
    assert len(set(group)) == len(group) >= 70
    assert all(re.fullmatch(r"[A-Za-z]+", word) for word in group)
