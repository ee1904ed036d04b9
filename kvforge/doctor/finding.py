"""One finding of ``kvforge doctor``."""

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """``status`` is ``ok``, ``optional`` (absent or too little, needed for some commands), ``missing``, or ``broken``
    (there and useless)."""

    name: str
    status: str
    found: str
    advice: str = ""


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
