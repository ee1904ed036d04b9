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
from kvforge.evaluation.run import EvalOptions, run_evaluation
from kvforge.manifest import load_manifest
from perf.harness.experiment import Experiment, Report, told
from perf.harness.options import named, number, option, output, place
from perf.harness.plots import panels
from perf.harness.tables import Row, columns_table, interval


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
    return [{"name": name, "kinds": len(own), **_mean(own)} for name, own in of_engine.items()]


def _mean(own: list[Row]) -> dict[str, float]:
    kl, same = (sum(row[name]["value"] for row in own) / len(own) for name in ("kl", "agreement"))
    perplexity = sum(row["perplexity"]["value"] / row["teacher_perplexity"]["value"] for row in own) / len(own)
    return {"kl": kl, "agreement": same, "perplexity": perplexity}


MEANS = (
    ("KL, nats a token", "kl", ".4f"), ("same best token", "agreement", ".1%"),
    ("perplexity, teacher's = 1", "perplexity", ".3f"),
)  # fmt: skip


def markdown(report: Report, subject: str = "engine") -> str:
    """Return the tables of rows that are of a ``subject`` each."""
    rows = report["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    of_name: dict[str, Row] = {}
    for row in rows:
        of_name.setdefault(row["name"], {"name": row["name"]})[row["kind"]] = row
    parts = [told(report), "Means over the kinds of text."]
    parts.append(columns_table([(subject, "name"), *MEANS], means(rows), "lrrr"))
    for title, show in (
        (f"KL(teacher ‖ {subject}), nats a token, 95% intervals", lambda row: interval(row["kl"], 4)),
        ("Same best token, %", lambda row: interval(row["agreement"], 1, 100)),
        ("Perplexity (teacher's)", "{0[perplexity][value]:.2f} ({0[teacher_perplexity][value]:.2f})".format),
    ):
        columns = [(kind, lambda own, kind=kind, show=show: show(own[kind]) if kind in own else "") for kind in kinds]
        parts += [title, columns_table([(subject, "name"), *columns], of_name.values(), "l" + "r" * len(kinds))]
    return "\n\n".join(parts) + "\n"


def plot(report: Report, path: Path) -> None:
    """KL of each engine by kind of text, on a logarithmic scale."""
    rows = report["rows"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    with panels(path, 8, 1 + 0.35 * len(names)) as (axes,):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            own = [row for row in rows if row["kind"] == kind]
            axes.plot([row["kl"]["value"] for row in own], [names.index(row["name"]) for row in own], "o", label=kind)
        axes.set(xscale="log", xlabel="KL(teacher ‖ engine), nats a token", yticks=range(len(names)), yticklabels=names)
        axes.invert_yaxis()


def make_report(args: argparse.Namespace) -> list[Row]:
    """Measure every engine on every text."""
    cells = [(*engine, text) for engine in args.engines for text in texts_of(args.texts)]
    return [
        measure(name, engine, args.teacher, text, args.num_documents, args.length)
        for name, engine, text in tqdm(cells, unit="text", disable=None)
    ]


def texts_of(folder: Path) -> list[Path]:
    """Return the files, one of each kind of text. Raises KvforgeError where there are none."""
    if texts := sorted(folder.glob("*.txt")):
        return texts
    raise KvforgeError(f"{folder} has no .txt file; perf.real_model.texts writes some.")


EXPERIMENT = Experiment(
    "perf.real_model.closeness", __doc__,
    options=(
        place("teacher"), place("texts"), option("engines", type=named, nargs="+", metavar="NAME=ENGINE"),
        number("--num-documents", 24, "of a kind (default %(default)s)"),
        number("--length", 1024, "tokens of a document (default %(default)s)"), output("OUTPUT.json, .md and .svg"),
    ),
    measure=make_report, merged=("name", "kind"), is_dated=True, shown=markdown, plot=plot,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
