"""The version of kvforge."""

__version__ = "0.1.0"
