"""Completion of the command line in shells, made from its parsers."""
