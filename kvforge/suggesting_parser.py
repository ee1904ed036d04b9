"""An ArgumentParser that suggests what a misspelt or foreign command, option or choice may have been."""

import argparse
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from kvforge.common.suggestions import did_you_mean
from kvforge.foreign_options import ALIASES, NEAREST, OTHERWISE

SIMILAR = 0.8
"""difflib's similarity from which on an option is taken for misspelt: below it the other one means something else."""


class SuggestingParser(argparse.ArgumentParser):
    """Its errors end with the nearest name, where one is near; options are to be written out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, action.choices or ())
            raise

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Leave out what a word of one dash only begins, which argparse abbreviates in any case: -n is not -np. Other
        programs' words are whole: -ctk is not -c tk."""
        word = option_string.partition("=")[0]
        if word.lstrip("-") in NEAREST.keys() | OTHERWISE.keys():
            return []
        return [found for found in super()._get_option_tuples(option_string) if len(found[1]) <= len(word)]

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line: a usage of eighty options above it hides it."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists what there is\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            command = getattr(parsed, "command", None) or ""
            hints = (self._hint(word, command) for word in words)
            commands_of(self).get(command, self).error(
                f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, hints), '')}"
            )
        return parsed

    def _hint(self, word: str, command: str) -> str:
        """Say what to write in place of an option that ``command`` does not have, or nothing."""
        plain = word.lstrip("-").replace("_", "-")
        options = set(options_below(commands_of(self).get(command, self)))
        if f"--{plain}" in options and word != f"-{plain}":
            return f"; did you mean --{plain}?"
        if plain in NEAREST:
            return self._says_where(NEAREST[plain], options)
        if plain in OTHERWISE:
            return f"; {OTHERWISE[plain]}"
        if owners := self._owners_of(word):
            return f"; {word} is an option of {owners}"
        near = nearest_option(word, options)
        return f"; did you mean {near}?" if near else ""

    def _says_where(self, option: str, options: set[str]) -> str:
        if option in options:
            return f"; the nearest option here is {option}"
        return f"; the nearest option here is {option}, an option of {self._owners_of(option)}"

    def _owners_of(self, option: str) -> str:
        """The commands that have an option."""
        commands = [name for name, parser in commands_of(self).items() if option in options_below(parser)]
        return f"{self.prog} {', '.join(commands)}" if commands else ""


def add_aliases(parser: argparse.ArgumentParser) -> None:
    """Have every command below a parser take the ALIASES of its options, too."""
    for command in commands_of(parser).values():
        add_aliases(command)
        for action in command._actions:
            for alias in aliases_of(action):
                command._option_string_actions[alias] = action


def aliases_of(action: argparse.Action) -> tuple[str, ...]:
    """The spellings elsewhere of what is declared as an option."""
    return tuple(alias for option in action.option_strings for alias in ALIASES.get(option, ()))


def nearest_option(word: str, options: Iterable[str]) -> str | None:
    """Return the option that ``word`` begins or misspells; None where all mean something else, as its opposite does."""
    plain = word.lstrip("-")
    known = {option.lstrip("-"): option for option in sorted(options) if option.startswith("--")}
    same_sense = [name for name in known if _is_negated(name) == _is_negated(plain)]
    if word.startswith("--") and len(plain) > 3:
        begun = [name for name in same_sense if name.startswith(plain)]
        if len(begun) == 1:
            return known[begun[0]]
    near = difflib.get_close_matches(plain, same_sense, n=1, cutoff=SIMILAR)
    return known[near[0]] if near else None


def _is_negated(name: str) -> bool:
    return name.startswith(("no-", "disable-", "without-"))


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a parser."""
    found = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: each for action in found for name, each in action.choices.items()}


def options_below(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command and of those below it; of ``kvforge`` itself its own alone."""
    yield from parser._option_string_actions
    if not isinstance(parser, SuggestingParser) or parser.prog.count(" "):
        for each in commands_of(parser).values():
            yield from options_below(each)
