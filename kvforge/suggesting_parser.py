"""An ArgumentParser that suggests what a misspelt command, option or choice may have been."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from kvforge.common.suggestions import did_you_mean


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

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            options = self._options_of(getattr(parsed, "command", None))
            hints = (self._owners_of(word) or did_you_mean(word, options) for word in words)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, hints), '')}")
        return parsed

    def _owners_of(self, option: str) -> str:
        """Say which other commands have an option."""
        commands = [name for name, parser in self._commands().items() if option in parser._option_string_actions]
        return f"; {option} is an option of {self.prog} {', '.join(commands)}" if commands else ""

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        return {
            name: parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for name, parser in action.choices.items()
        }

    def _options_of(self, command: str | None) -> Iterable[str]:
        return self._commands().get(command or "", self)._option_string_actions
