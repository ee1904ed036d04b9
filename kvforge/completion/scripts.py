"""The scripts of bash, zsh and fish. They do not call kvforge while they complete."""

import shlex
from collections.abc import Callable, Iterable, Sequence

from kvforge.completion.tree import Command, Option

_BASH = """\
_kvforge() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" at="kvforge" options="" words="" i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${{COMP_WORDS[i]}}" in
            {below}) at="$at ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$at $prev" in
{values}
    esac
    case "$at" in
{commands}
    esac
    if [[ "$cur" == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
    else
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
    fi
}}
complete -o default -F _kvforge kvforge
"""
"""Where it offers no word, the shell offers files."""

_ZSH = """\
#compdef kvforge
autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit
bashcompinit
"""

_FISH = """\
function __kvforge_at
    set -l at kvforge
    for word in (commandline -opc)[2..-1]
        switch "$at $word"
            case {below}
                set at "$at $word"
        end
    end
    echo $at
end
"""


def bash(commands: Sequence[Command]) -> str:
    """Return the script for bash, which needs no package besides."""
    values, here = [], []
    for command in commands:
        free = [
            flag for option in command.options if option.takes_value and not option.choices for flag in option.flags
        ]
        if free:
            values.append(f"        {_patterns(f'{command.path} {flag}' for flag in free)}) return ;;")
        for option in command.options:
            if option.choices:
                flags, choices = _patterns(f"{command.path} {flag}" for flag in option.flags), " ".join(option.choices)
                values.append(f'        {flags}) COMPREPLY=($(compgen -W "{choices}" -- "$cur")); return ;;')
        options = " ".join(flag for option in command.options for flag in option.flags)
        words = " ".join((*(name for name, _ in command.parts), *command.words))
        here.append(f'        "{command.path}") options="{options}"; words="{words}" ;;')
    return _BASH.format(below=_patterns(_below(commands)), values="\n".join(values), commands="\n".join(here))


def zsh(commands: Sequence[Command]) -> str:
    """Return the script for zsh, which takes that of bash."""
    return _ZSH + bash(commands)


def fish(commands: Sequence[Command]) -> str:
    """Return the script for fish."""
    below = " ".join(shlex.quote(path) for path in _below(commands))
    lines = []
    for command in commands:
        here = f"-c kvforge -n \"test (__kvforge_at) = '{command.path}'\""
        offered = [*command.parts, *((word, "") for word in command.words)]
        lines += [f"complete {here} -f -a {name} -d {shlex.quote(text)}" for name, text in offered]
        lines += [f"complete {here} {_fish_option(option)}" for option in command.options]
    return _FISH.format(below=below) + "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
"""What makes the script of each shell."""


def _below(commands: Sequence[Command]) -> list[str]:
    """The words up to each command but the first."""
    return [command.path for command in commands[1:]]


def _patterns(texts: Iterable[str]) -> str:
    return "|".join(f'"{text}"' for text in texts)


def _fish_option(option: Option) -> str:
    names = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
    value = f" -x -a {shlex.quote(' '.join(option.choices))}" if option.choices else " -r" if option.takes_value else ""
    return f"{' '.join(names)}{value} -d {shlex.quote(option.help)}"
