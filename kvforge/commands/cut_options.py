"""What the command line says of a cut's kind."""

import argparse
from collections.abc import Sequence

from kvforge.common.errors import KvforgeError

BLIND = "blind"
DEFAULT_ANCHORS = 32
"""As many as the default page of an engine has tokens."""


def add_num_anchors(parser: argparse.ArgumentParser) -> None:
    """Declare ``--num-anchors``."""
    parser.add_argument(
        "--num-anchors",
        type=int,
        metavar="N",
        help=f"first tokens of a prompt that upper layers see with --cut-kind {BLIND} (default: {DEFAULT_ANCHORS})",
    )


def anchors_of(kinds: Sequence[str], num_anchors: int | None) -> list[int]:
    """Return the anchors of cuts of these kinds: 0 unless one is blind; raises KvforgeError for fewer than one, or
    where none of them has any."""
    if num_anchors is not None and num_anchors < 1:
        raise KvforgeError(f"--num-anchors is {num_anchors}; give at least 1.")
    if num_anchors is not None and BLIND not in kinds:
        raise KvforgeError(f"--num-anchors is for --cut-kind {BLIND}; give both, or leave it out.")
    return [(num_anchors or DEFAULT_ANCHORS) if kind == BLIND else 0 for kind in kinds]
