"""The folders whose names stand in the command lines of a build, and what may be in these names."""

import importlib.util
import os
import re
import shlex
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

_QUOTING = re.compile(r"""["'\\]""")


def build_paths() -> tuple[str, ...]:
    """Return the folders of Python, torch, temporary files and Inductor's cache, as given and with links resolved."""
    spec = importlib.util.find_spec("torch")
    given = [
        tempfile.gettempdir(),
        os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("include"),
        None if spec is None or spec.origin is None else str(Path(spec.origin).parent),
    ]
    paths = [os.path.abspath(path) for path in given if path]
    return tuple(dict.fromkeys([*paths, *map(os.path.realpath, paths)]))


def with_whitespace(paths: Iterable[str]) -> list[str]:
    """Return the paths that a command line without quotes breaks at."""
    return [path for path in paths if re.search(r"\s", path)]


def with_quotes(paths: Iterable[str]) -> list[str]:
    """Return the paths that `split_command` cannot keep whole."""
    return [path for path in paths if _QUOTING.search(path)]


def split_command(line: str, paths: Iterable[str]) -> list[str]:
    """Return the words of a shell command in which ``paths`` may stand with or without quotes around their spaces, as
    in torch's command lines."""
    spaced = sorted(with_whitespace(paths), key=len, reverse=True)  # a folder before the one that it is in
    names = {f"@kvforge{index}@": path for index, path in enumerate(spaced)}
    for name, path in names.items():
        line = line.replace(path, name)
    words = shlex.split(line)
    for name, path in names.items():
        words = [word.replace(name, path) for word in words]
    return words
