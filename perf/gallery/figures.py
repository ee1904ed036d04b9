"""Draw the figures of docs/gallery.md (`make figures`).

    python -m perf.gallery.figures [--only NAME ...]

Each figure's numbers are made again, from a seed and nothing else, and written to perf/results/gallery-NAME.json; the
picture to docs/images/gallery-NAME.svg.
"""

import sys
from pathlib import Path

from perf.gallery.figure import Figure
from perf.gallery.memory import MEMORY
from perf.gallery.sharing import SHARING
from perf.gallery.waste import WASTE
from perf.harness.command import make_parser, run_main
from perf.harness.engines import ROOT
from perf.harness.files import write_json

FIGURES = {figure.name: figure for figure in (MEMORY, WASTE, SHARING)}


def draw(figure: Figure, root: Path) -> None:
    """Write a figure's numbers and its picture below the repository's ``root``."""
    report = {"command": f"python -m perf.gallery.figures --only {figure.name}", **figure.make()}
    write_json(root / "perf/results" / f"gallery-{figure.name}.json", report)
    figure.plot(report, root / "docs/images" / f"gallery-{figure.name}.svg")


def main() -> None:
    """Draw all figures, or those that are named."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="NAME", help="of a figure")
    args = parser.parse_args()
    for name in args.only:
        print(name, flush=True)
        draw(FIGURES[name], ROOT)


if __name__ == "__main__":
    sys.exit(run_main(main))
