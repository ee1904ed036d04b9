"""How much of a cut's damage distillation recovers, over the tokens that it has seen.

    python -m perf.real_model.recovery REWIRED DATA TEXTS --max-steps 64 [--output perf/results/NAME]

REWIRED is what ``kvforge rewire`` has written, DATA as ``kvforge distill`` takes it; TEXTS has a held-out text file for
each kind, such as the ``held-out`` of ``perf.real_model.texts``. The steps are those of one run of ``kvforge distill``,
so the learning rate falls over all of them. Before the first and after each of ``--num-points`` parts the student and
its teacher read the texts: KL(teacher || student) in nats a token, the share of tokens before which both find the same
one most probable, and perplexity, means over the kinds. What a run has reached lies in --work with the weights that it
has trained, which ``perf.real_model.assemble`` makes a checkpoint of; the same command goes on from there. Writes
OUTPUT.json, .md and .svg.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.errors import KvforgeError
from kvforge.distill import DistillConfig, distill
from kvforge.distill.data import load_data
from kvforge.distill.packing import DataSettings
from kvforge.distill.trained_parameters import is_trained
from kvforge.evaluation.documents import text_documents
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.swiftkv import SwiftKVForCausalLM, load_model, make_layout
from perf.harness.experiment import Experiment, Report, number, option, output, place, positive_float, work
from perf.harness.files import read_json, write_json
from perf.harness.plots import panels
from perf.harness.tables import Row
from perf.real_model.closeness import means, texts_of
from perf.real_model.outputs import closeness, sums_of

WEIGHTS = "student.safetensors"
"""The weights that distillation trains, in bf16."""
KEPT = "curve.json"
"""The points so far."""


@torch.inference_mode()
def student_rows(
    model: SwiftKVForCausalLM, tokenizer: Tokenizer, texts: Sequence[Path], num_documents: int, length: int, device: str
) -> list[dict[str, Any]]:
    """Return a row of closeness of a student to the teacher in its own weights, for each kind of text."""
    rows = []
    for text in texts:
        documents, sums = text_documents(text, tokenizer, num_documents, length), []
        for document in documents:
            ids = torch.tensor(document, device=device)
            layout = make_layout(model.sizes, len(document), device=device)
            with torch.autocast(device, torch.bfloat16):
                hidden = model.model.lower(ids[None], layout)
                teacher, student = (model.model.upper(hidden, layout, which)[0][0] for which in (True, False))
                sums.append(sums_of(student, teacher, model.head, ids))
        rows.append({"name": "student", "kind": text.stem, **closeness(sums, documents)})
    return rows


def recovered(first: Row, last: Row) -> dict[str, float]:
    """Return which share of the damage is gone, of means over kinds of text, and the perplexity left, the teacher's
    being 1. The damage of ``kl`` is the KL itself, that of ``agreement`` what lacks to 1."""
    return {
        "kl": 1 - last["kl"] / first["kl"],
        "agreement": 1 - (1 - last["agreement"]) / (1 - first["agreement"]),
        "perplexity": last["perplexity"],
    }


def part_ends(total: int, num: int) -> list[int]:
    """Return the steps after which ``num`` parts of a run end, as many as there are."""
    return sorted({-(-total * part // num) for part in range(1, num + 1)})


def is_new(name: str, model: SwiftKVForCausalLM) -> bool:
    """Return whether distillation trains this weight."""
    return is_trained(name, model.sizes.cut, "partial")


def save_trained(model: SwiftKVForCausalLM, path: Path) -> None:
    """Write what distillation has trained."""
    weights = {
        name: p.detach().to("cpu", torch.bfloat16) for name, p in model.named_parameters() if is_new(name, model)
    }
    save_file(weights, path)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the student's points: before training, and after each part."""
    points: list[Row] = read_json(args.work / KEPT, [])
    seen = [point["step"] for point in points]
    left = [step for step in [0, *part_ends(args.max_steps, args.num_points)] if step not in seen]
    if left and args.minutes > 0:
        train(args, left, points)
    if not points:
        raise KvforgeError(f"{args.work} has no point of the curve; give more --minutes.")
    for point in points:
        yield point | {"recovered": recovered(points[0], point)}


def train(args: argparse.Namespace, left: list[int], points: list[Row]) -> None:
    """Train up to the steps that are ``left``; the point of each is kept behind the others."""
    deadline, texts = time.monotonic() + 60 * args.minutes, texts_of(args.texts)
    config = DistillConfig(
        length=args.length, batch_size=args.batch_size, lr=args.lr, max_steps=args.max_steps, device="cpu"
    )
    checkpoint, tokenizer = open_model(args.rewired), Tokenizer.from_dir(args.rewired)
    sizes = read_model_config(checkpoint)
    if sizes.cut == sizes.num_layers or tokenizer is None:
        raise KvforgeError(f"{args.rewired} has no cut or no tokenizer; kvforge rewire --cut-layer makes a student.")
    model = load_model(checkpoint, sizes, torch.bfloat16, with_teacher=True)
    data, told = load_data(args.data, args.rewired, sizes.vocab_size, DataSettings(args.length))
    print(told.line(), flush=True)
    args.work.mkdir(parents=True, exist_ok=True)
    for step in left:
        if time.monotonic() > deadline:
            break
        point: Row = {"step": 0, "tokens": 0, "seconds": 0.0}
        if step:
            state = distill(config, model, data, args.work / "training", progress=False, stop_after=step)
            save_trained(model, args.work / WEIGHTS)
            point = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 1)}
        found = means(student_rows(model, tokenizer, texts, args.num_documents, args.length, "cpu"))[0]
        points.append(point | {name: round(found[name], 5) for name in ("kl", "agreement", "perplexity")})
        write_json(args.work / KEPT, points)
        print(points[-1], flush=True)


def plot(report: Report, path: Path) -> None:
    """What is recovered of KL and agreement, over the tokens trained on."""
    with panels(path, 4, 2.4) as (axes,):
        for key in ("kl", "agreement"):
            shares = [100 * row["recovered"][key] for row in report["rows"]]
            axes.plot([row["tokens"] / 1000 for row in report["rows"]], shares, label=key)
        axes.set(xlabel="thousand tokens", ylabel="recovered, %")
        axes.locator_params(nbins=2)


EXPERIMENT = Experiment(
    "perf.real_model.recovery", __doc__,
    options=(
        place("rewired"), place("data"), place("texts"), number("--max-steps", 64, "(default %(default)s)"),
        number("--batch-size", 8, "sequences of a step (default %(default)s)"),
        number("--length", 1024, "tokens of a sequence and of a document (default %(default)s)"),
        option("--lr", type=positive_float, default=1e-3, help="(default %(default)g)"),
        number("--num-points", 8, "parts of the run (default %(default)s)"),
        option("--minutes", type=float, default=float("inf"), help="begin no part after these; 0: report what is kept"),
        number("--num-documents", 4, "of a kind (default %(default)s)"),
        work("runs/recovery", "the run (default: %(default)s)"), output("OUTPUT.json, .md and .svg"),
    ),
    measure=rows, is_dated=True, plot=plot, align="rrrrrrr",
    columns=(
        ("tokens", "tokens"), ("seconds of training", "seconds", ".0f"), ("KL, nats a token", "kl", ".3f"),
        ("recovered", lambda row: f"{row['recovered']['kl']:.0%}"), ("same best token", "agreement", ".1%"),
        ("recovered", lambda row: f"{row['recovered']['agreement']:.0%}"),
        ("perplexity, teacher's = 1", "perplexity", ".2f"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
