"""The C++ compiler that AOTInductor and the operator kernels need at build time."""

import os
import shutil

from kvforge.common.errors import BuildError


def find_compiler() -> str | None:
    """Return the C++ compiler that would be used: $CXX if set, else g++; None if it is not on PATH."""
    return shutil.which(os.environ.get("CXX") or "g++")


def check_compiler() -> None:
    """Raise BuildError when there is no C++ compiler."""
    if find_compiler() is None:
        raise BuildError(
            "No C++ compiler was found, and building an engine needs one; install g++ "
            "(Debian and Ubuntu: apt-get install g++) or set CXX."
        )
