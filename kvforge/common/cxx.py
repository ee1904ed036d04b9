"""The C++ compiler of this machine."""

import os
import shutil


def cxx() -> str:
    """Return its name: ``$CXX`` if set, else ``g++``."""
    return os.environ.get("CXX") or "g++"


def find_cxx() -> str | None:
    """Return where it is, None where there is none on ``PATH``."""
    return shutil.which(cxx())
