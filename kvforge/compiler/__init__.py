"""From a checkpoint to an engine directory: export, verify, compile, write."""

from kvforge.compiler.build import build_engine
from kvforge.compiler.options import BuildOptions

__all__ = ["BuildOptions", "build_engine"]
