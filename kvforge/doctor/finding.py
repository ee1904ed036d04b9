"""One finding of ``kvforge doctor``."""

import importlib.metadata
from dataclasses import dataclass

EVERY_COMMAND, BUILD, SERVE, GPU = (
    "every command",
    "kvforge build",
    "kvforge serve",
    "targets cuda and tensorrt on a GPU",
)
"""What checks are needed for."""


@dataclass(frozen=True)
class Check:
    """``status`` is ``ok``, ``optional`` (absent or too little, needed for some commands), ``missing``, or ``broken``
    (there and useless). ``advice`` says how to mend it, ``needed_for`` what for; facts of the machine are
    for nothing."""

    name: str
    status: str
    found: str
    advice: str = ""
    needed_for: str = ""


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
