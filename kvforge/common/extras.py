"""The optional parts of kvforge (`extras` to pip), and what to say where one is absent or broken."""

import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path

from kvforge.common.errors import MissingToolError, first_line

SOURCE_TREE = Path(__file__).resolve().parents[2]
"""Where pyproject.toml is, if kvforge runs from its source tree."""


def how_to_install(extra: str) -> str:
    """Return the command that installs ``extra``: of the source tree, or beside a kvforge that came as a wheel; where
    the environment has no pip, as uv makes them, it is uv's."""
    # Looking for pip as a module would have setuptools leave distutils alone for the rest of the process, and then
    # refuse to be imported, which compiling needs.
    pip = "pip install" if any(distributions(name="pip")) else f"uv pip install --python {shlex.quote(sys.executable)}"
    is_source_tree = (SOURCE_TREE / "pyproject.toml").is_file()
    return f"{pip} -e '.[{extra}]'" if is_source_tree else f"{pip} 'kvforge[{extra}]'"


def import_failed(need: str, extra: str, error: Exception) -> MissingToolError:
    """Return the error of an import that failed.

    Args:
        need: the beginning of the sentence, which ends in the package's name: ``"Plots need matplotlib"``.
        extra: what brings the package.
        error: what the import raised. A ModuleNotFoundError means that something is absent; all else is the fault of
            packages that are there.
    """
    if isinstance(error, ModuleNotFoundError):
        return MissingToolError(f"{need} ({first_line(error)}): {how_to_install(extra)}.")
    return MissingToolError(
        f"{need}, which is installed but cannot be imported ({type(error).__name__}: {first_line(error)}); "
        f"kvforge doctor says which package is broken, and {how_to_install(extra)} brings versions that fit."
    )
