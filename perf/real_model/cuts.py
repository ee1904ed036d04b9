"""What cuts and AcrossKV groups cost a real model before any distillation, over the share of prefill that they save.

    python -m perf.real_model.cuts CHECKPOINT TEXTS CALIBRATION [--skipped 0.25 0.4 0.5 0.625] [--group-size 1 2 4]
        [--output perf/results/NAME]

Each student has the projections that ``kvforge rewire --init ridge --calibration CALIBRATION`` fits; all are fitted to
one pass over the text, and none is written. TEXTS has a text file for each kind, such as the ``held-out`` of
``perf.real_model.texts``. For each student and kind: KL(teacher || student) in nats a token, the share of tokens before
which both find the same one most probable, and perplexity, with 95% intervals over documents. Computed in bf16. Writes
OUTPUT.json, .md and .svg.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from kvforge.evaluation.documents import text_documents
from kvforge.rewire import RewireOptions
from kvforge.rewire.initialise import new_tensors
from kvforge.rewire.inputs import LayerInputs, record_inputs
from kvforge.rewire.ridge import fit_owners
from kvforge.rewire.source import PlainCheckpoint, open_source
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.swiftkv import SwiftKVForCausalLM, load_model, make_layout
from kvforge.tokenization.calibration import calibration_samples
from model_defs import ModelConfig
from perf.harness.experiment import Experiment, Report, number, numbers, option, output, place
from perf.harness.plots import panels
from perf.real_model.closeness import markdown, means
from perf.real_model.outputs import closeness, sums_of

INIT = "ridge"


class Teacher:
    """A model's outputs on documents of one kind, and what enters the layers at ``cuts``."""

    @torch.inference_mode()
    def __init__(self, model: SwiftKVForCausalLM, documents: list[list[int]], cuts: list[int]) -> None:
        self.documents = documents
        self.hidden: list[dict[int, Tensor]] = []
        self.outputs: list[Tensor] = []
        for document in documents:
            layout, entering = make_layout(model.sizes, len(document)), {}
            hidden = model.model.embed(torch.tensor([document]))
            for index, layer in enumerate(model.model.layers):
                if index in cuts:
                    entering[index] = hidden
                hidden = layer(hidden, None, layout)
            self.hidden.append(entering)
            self.outputs.append(model.model.norm(hidden)[0])

    @torch.inference_mode()
    def compare(self, student: SwiftKVForCausalLM) -> dict[str, Any]:
        """Return how close a student is, which shares the layers below its cut."""
        sums = []
        for document, entering, expected in zip(self.documents, self.hidden, self.outputs, strict=True):
            layout = make_layout(student.sizes, len(document))
            output = student.model.upper(entering[student.sizes.cut], layout)[0][0]
            sums.append(sums_of(output, expected, student.head, torch.tensor(document)))
        return closeness(sums, self.documents)


def student_of(
    source: PlainCheckpoint, plain: SwiftKVForCausalLM, config: ModelConfig, inputs: LayerInputs
) -> SwiftKVForCausalLM:
    """Return the model ``config`` with what ``kvforge rewire`` fits to the source's recorded ``inputs``; its other
    weights are those of ``plain``."""
    _, fitted = fit_owners(source, config, inputs, RewireOptions(config.cut).ridge)
    new, kept = new_tensors(source, config, INIT, fitted), plain.state_dict()
    with torch.device("meta"):
        student = SwiftKVForCausalLM(config)
    dtype = plain.model.embed_tokens.weight.dtype
    weights = {name: kept[name] if name in kept else new[name][1]().to(dtype) for name in student.state_dict()}
    student.load_state_dict(weights, assign=True)
    return student.eval()


def cuts_of(num_layers: int, skipped: list[float]) -> list[int]:
    """Return the cut below which so much of the layers lies that these shares are skipped, to the nearest layer."""
    return [min(max(round(num_layers * (1 - share)), 1), num_layers - 1) for share in skipped]


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each student and kind of text."""
    source = open_source(args.checkpoint)
    plain = load_model(source.checkpoint, source.config, torch.bfloat16)
    tokenizer = Tokenizer.from_dir(source.checkpoint.folder)
    files = sorted(args.texts.glob("*.txt"))
    if tokenizer is None or not files:
        raise KvforgeError(f"{args.texts} has no .txt file, or {args.checkpoint} no tokenizer; both are needed.")
    cuts = cuts_of(source.config.num_layers, args.skipped)
    teachers = {
        file.stem: Teacher(plain, text_documents(file, tokenizer, args.num_documents, args.length), cuts)
        for file in files
    }
    vocab_size, options = source.config.vocab_size, RewireOptions(cuts[0])
    samples = calibration_samples(
        source.checkpoint.folder, vocab_size, args.calibration, args.num_samples, options.num_tokens
    )
    with tempfile.TemporaryDirectory() as work:
        inputs = record_inputs(source, samples, Path(work), min(cuts))
        for cut, size in tqdm([(cut, size) for cut in cuts for size in args.group_size], unit="student", disable=None):
            config = replace(source.config, cut=cut, group_size=size)
            student = student_of(source, plain, config, inputs)
            of_cut = {"cut": cut, "group_size": size, "skipped": 1 - cut / config.num_layers}
            name = f"cut {cut} of {config.num_layers}" + (f", {size}-way" if size > 1 else "")
            for kind, teacher in teachers.items():
                yield {"name": name, "kind": kind, **of_cut, **teacher.compare(student)}


def plot(report: Report, path: Path) -> None:
    """KL and agreement over the share of prefill that is skipped, a line for each size of groups; means over kinds."""
    of_name = {row["name"]: row for row in report["rows"]}
    found = [{**of_name[mean["name"]], **mean} for mean in means(report["rows"])]
    sides = ("kl", "KL, nats a token", "log"), ("agreement", "same best token", "linear")
    with panels(path, 9, 3.6, 2) as both:
        for axes, (key, label, scale) in zip(both, sides, strict=True):
            for size in sorted({row["group_size"] for row in found}):
                line = sorted((row["skipped"], row[key]) for row in found if row["group_size"] == size)
                axes.plot(*zip(*line, strict=True), "o-", label=f"{size}-way" if size > 1 else "no groups")
            axes.set(xlabel="share of the layers that prompts skip", ylabel=label, yscale=scale)


EXPERIMENT = Experiment(
    "perf.real_model.cuts", __doc__,
    options=(
        place("checkpoint"), place("texts"), place("calibration", "a text file that the projections are fitted to"),
        option("--skipped", type=float, nargs="+", default=[0.25, 0.4, 0.5, 0.625], metavar="SHARE"),
        numbers("--group-size", [1, 2, 4]), number("--num-samples", 64, "of calibration (default %(default)s)"),
        number("--num-documents", 6, "of a kind (default %(default)s)"),
        number("--length", 512, "tokens of a document (default %(default)s)"), output("OUTPUT.json, .md and .svg"),
    ),
    measure=rows, is_dated=True, shown=partial(markdown, subject="student"), plot=plot,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
