"""How close engines of one model are to the model itself, on held-out texts of several kinds.

    python -m perf.real_model.closeness TEACHER TEXTS NAME=ENGINE ... [--num-documents 24] [--length 1024]
        [--output perf/results/NAME]

TEXTS is a folder with a text file for each kind, such as the ``held-out`` of ``perf.real_model.texts``. For each
engine and kind: perplexity, KL(teacher || engine) in nats a token, and the share of tokens before which both find the
same one most probable, with 95% intervals over documents. Rows of an earlier run in OUTPUT.json stay where they are
not measured again. Writes OUTPUT.json, .md and .svg.
"""

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from kvforge.common.figures import new_figure, save_figure
from kvforge.evaluation.run import EvalOptions, run_evaluation
from kvforge.manifest import load_manifest
from perf.harness.command import Report, add_report, begin_dated_report, make_parser, positive, run_program
from perf.harness.files import merge_rows, read_json
from perf.harness.tables import markdown_table


def measure(name: str, engine: Path, teacher: Path, text: Path, num: int, length: int) -> dict[str, Any]:
    """Return the row of an engine and a text."""
    options = EvalOptions(tasks=(), documents=str(text), num_documents=num, length=length)
    found = run_evaluation(engine, teacher, options).documents
    assert found is not None
    manifest = load_manifest(engine)
    bytes_per_token = manifest.page_bytes // manifest.page_size
    return {"name": name, "kind": text.stem, "kv_bytes_per_token": bytes_per_token, **found, "source": text.name}


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each engine what it has on average over kinds: ``kl``, ``agreement``, and ``perplexity``, the ratio to
    the teacher's."""
    of_engine: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_engine.setdefault(row["name"], []).append(row)
    return [
        {
            "name": name,
            "kinds": len(own),
            "kl": sum(row["kl"]["value"] for row in own) / len(own),
            "agreement": sum(row["agreement"]["value"] for row in own) / len(own),
            "perplexity": sum(row["perplexity"]["value"] / row["teacher_perplexity"]["value"] for row in own)
            / len(own),
        }
        for name, own in of_engine.items()
    ]


def markdown(report: Report, subject: str = "engine") -> str:
    """Return the tables of rows that are of a ``subject`` each."""
    rows = report["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cells = {(row["name"], row["kind"]): row for row in rows}
    lines = [f"`{report['command']}`, {report['date']}, {report['machine']}", ""]
    head = [subject, "KL, nats a token", "same best token", "perplexity, teacher's = 1"]
    lines += ["Means over the kinds of text.", ""]
    body = [
        [m["name"], f"{m['kl']:.4f}", f"{100 * m['agreement']:.1f}%", f"{m['perplexity']:.3f}"] for m in means(rows)
    ]
    lines += [markdown_table(head, body, "lrrr")]
    for title, show in (
        (f"KL(teacher ‖ {subject}), nats a token, 95% intervals", lambda row: _interval(row["kl"], 4)),
        ("Same best token, %", lambda row: _interval(row["agreement"], 1, 100)),
        (
            "Perplexity (teacher's)",
            lambda row: f"{row['perplexity']['value']:.2f} ({row['teacher_perplexity']['value']:.2f})",
        ),
    ):
        table = [
            [name, *(show(cells[name, kind]) if (name, kind) in cells else "" for kind in kinds)]
            for name in dict.fromkeys(row["name"] for row in rows)
        ]
        lines += ["", title, "", markdown_table([subject, *kinds], table, "l" + "r" * len(kinds))]
    return "\n".join(lines) + "\n"


def _interval(estimate: dict[str, float], digits: int, factor: float = 1) -> str:
    low, value, high = (f"{factor * estimate[part]:.{digits}f}" for part in ("low", "value", "high"))
    return f"{value} ({low} to {high})"


def plot(report: Report, path: Path) -> None:
    """KL of each engine by kind of text, on a logarithmic scale."""
    rows = report["rows"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure = new_figure(8, 1 + 0.35 * len(names))
    axes = figure.subplots()
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        axes.plot([row["kl"]["value"] for row in own], [names.index(row["name"]) for row in own], "o", label=kind)
    axes.set(xscale="log", xlabel="KL(teacher ‖ engine), nats a token", yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def make_report(args: argparse.Namespace) -> Report:
    """Measure every engine on every text."""
    texts = sorted(args.texts.glob("*.txt"))
    if not texts:
        raise KvforgeError(f"{args.texts} has no .txt file; perf.real_model.texts writes some.")
    cells = [(*engine, text) for engine in args.engines for text in texts]
    new = [
        measure(name, engine, args.teacher, text, args.num_documents, args.length)
        for name, engine, text in tqdm(cells, unit="text", disable=None)
    ]
    old = read_json(args.output.with_suffix(".json"), {"rows": []})["rows"] if args.output else []
    return {**begin_dated_report("perf.real_model.closeness"), "rows": merge_rows(old, new, ("name", "kind"))}


def named(text: str) -> tuple[str, Path]:
    """The type of NAME=ENGINE."""
    name, mark, engine = text.partition("=")
    if not (name and mark and engine):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ENGINE")
    return name, Path(engine)


def main() -> int:
    """Print the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("engines", type=named, nargs="+", metavar="NAME=ENGINE")
    parser.add_argument("--num-documents", type=positive, default=24, help="of a kind (default %(default)s)")
    parser.add_argument("--length", type=positive, default=1024, help="tokens of a document (default %(default)s)")
    add_report(parser, "OUTPUT.json, .md and .svg")
    args = parser.parse_args()
    return run_program(args, lambda: make_report(args), markdown, markdown=True, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
