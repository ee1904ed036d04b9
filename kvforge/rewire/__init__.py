"""Turns a plain checkpoint into a SwiftKV one (arXiv 2410.03960): where to cut, and what its projections begin as."""

from kvforge.rewire.convert import RewireSummary, rewire_checkpoint
from kvforge.rewire.options import INITS, RewireOptions

__all__ = ["INITS", "RewireOptions", "RewireSummary", "rewire_checkpoint"]
