"""Traffic such as agents make: prompts from a few templates, whose answers repeat one another across requests."""

import random
from collections.abc import Callable

from kvforge.tasks.filler import sentence
from kvforge.tasks.prompt import make_examples

FILES = ("auth/login.py", "api/routes.py", "core/cache.py", "utils/dates.py", "db/models.py", "cli/main.py")
PROBLEMS = (
    "the test test_timeout fails with KeyError", "the function parse returns None for empty input",
    "an import of a module that was renamed fails", "the limit of retries is ignored", "a file handle is never closed",
)  # fmt: skip
TOOLS = ("read_file(path)", "edit_file(path, old, new)", "run_tests(path)", "search(text)")
STATES = ("You have not looked at it yet.", "You have read the file.", "You have edited the file.")


def tool_calls(rng: random.Random) -> str:
    """A step of an agent that repairs programs."""
    return (
        f"You are a careful software agent. Your tools are: {', '.join(TOOLS)}.\n"
        f"Task {rng.randrange(1000)}: in {rng.choice(FILES)}, {rng.choice(PROBLEMS)}. {rng.choice(STATES)}\n"
        "Explain in one paragraph what is wrong and what to do, and then write the call of the next tool as JSON."
    )


def records(count_tokens: Callable[[str], int], seed: int) -> Callable[[random.Random], str]:
    """Questions about one of a few records, each behind sentences of the request's own."""
    known = [example.prompt for example in make_examples("list_recall", 120, count_tokens, 12, seed)]
    return lambda rng: " ".join(sentence(rng) for _ in range(rng.randrange(6, 16))) + " " + rng.choice(known)
