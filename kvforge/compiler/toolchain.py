"""The C++ compiler that AOTInductor and the operator kernels need at build time."""

from kvforge.common.build_paths import build_paths, with_quotes, with_whitespace
from kvforge.common.cxx import find_cxx
from kvforge.common.errors import BuildError


def check_compiler() -> None:
    """Raise BuildError when there is no C++ compiler on PATH: $CXX if set, else g++."""
    if find_cxx() is None:
        raise BuildError(
            "No C++ compiler was found, and building an engine needs one; install g++ "
            "(Debian and Ubuntu: apt-get install g++) or set CXX."
        )


def check_paths(*, spaces: bool) -> None:
    """Raise BuildError where a folder that compilers read or write has a name that their command lines break at.

    Args:
        spaces: names may have spaces. Torch's own calls of the compiler do not quote all of them.
    """
    wrong = with_quotes(build_paths()) + ([] if spaces else with_whitespace(build_paths()))
    if wrong:
        what = "quotes or backslashes" if spaces else "spaces, quotes or backslashes"
        raise BuildError(
            f"The compilers' command lines break at {wrong[0]!r}; install the environment and set TMPDIR (and "
            f"TORCHINDUCTOR_CACHE_DIR, if set) to folders without {what} in their names."
        )
