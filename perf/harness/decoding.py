"""Options of programs that measure decode steps of batches with several dtypes of the weights."""

import argparse

from kvforge.compiler.options import PACKED_DTYPES
from perf.harness.command import add_lengths, add_report, add_work, positive


def add_decoding(parser: argparse.ArgumentParser, input_tokens: int) -> None:
    """Declare batches, dtypes, lengths (prompts of ``input_tokens`` by default), and where engines and results lie."""
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--weight-dtype", nargs="+", default=["auto"], choices=["auto", *PACKED_DTYPES])
    add_lengths(parser, input_tokens, 33)
    add_work(parser)
    add_report(parser, "OUTPUT.json and OUTPUT.md")
