"""The students of ``perf.quality.swiftkv``: the recipe of the committed student, with another cut, groups or init."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvforge.checkpoint import open_checkpoint
from kvforge.distill import distill
from kvforge.distill.data import load_data
from kvforge.distill.export import export_checkpoint
from kvforge.distill.packing import DataSettings
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.swiftkv import SwiftKVForCausalLM, load_model, make_layout
from model_defs import load_config
from perf.harness.engines import TEACHER_DIR
from perf.harness.processes import make_all
from perf.quality.swiftkv_variants import RECIPES, Variant
from perf.training.config import TINY_STUDENT, Stage
from perf.training.student_data import documents, write_samples
from perf.training.tokenizer import FastEncoder

CURVE_EVERY, CURVE_DOCUMENTS = 10, 8
NUM_STEPS = 50
"""Of a distillation, unless told otherwise."""


@dataclass(frozen=True)
class Subject:
    """A teacher's checkpoint, and what its students are distilled on unless a variant names other documents."""

    teacher: Path
    documents: Stage


TINY = Subject(TEACHER_DIR, TINY_STUDENT.documents)


def held_out_documents(num: int, subject: Subject = TINY) -> list[list[int]]:
    """Return token ids of documents that no student was trained on."""
    encode = FastEncoder(Tokenizer.from_file(str(subject.teacher / "tokenizer.json")))
    return list(documents(dataclasses.replace(subject.documents, sequences=num), 1_000_000, encode))


def merge_heads(model: SwiftKVForCausalLM) -> None:
    """Make all KV heads of a layer above the cut one, and keep them one: their gradients are averaged."""
    head_dim = model.sizes.head_dim

    def mean(weight: torch.Tensor) -> torch.Tensor:
        heads = weight.unflatten(0, (-1, head_dim))
        return heads.mean(0, keepdim=True).expand_as(heads).flatten(0, 1).contiguous()

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(mean(parameter.grad))

    for name, parameter in model.named_parameters():
        if name.endswith(("k_proj_swiftkv.weight", "v_proj_swiftkv.weight")):
            parameter.data = mean(parameter.data)
            parameter.register_post_accumulate_grad_hook(average)


@dataclass
class Curve:
    """KL(teacher || student) in nats per token over a few held-out documents, every ``CURVE_EVERY`` steps."""

    file: Path
    model: SwiftKVForCausalLM
    teacher: SwiftKVForCausalLM
    subject: Subject = TINY

    def __post_init__(self) -> None:
        ids = held_out_documents(CURVE_DOCUMENTS, self.subject)
        length = min(map(len, ids))
        self.ids = torch.tensor([document[:length] for document in ids])

    def __call__(self, row: Mapping[str, float]) -> None:
        """Note the KL after step ``row["step"]``, once."""
        points = json.loads(self.file.read_text()) if self.file.is_file() else []
        step = int(row["step"])
        points = [point for point in points if point[0] < step]
        if step % CURVE_EVERY == 0:
            points.append([step, self.measure()])
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(points))

    @torch.no_grad()
    def measure(self) -> float:
        """Return the KL of the model as it is now, in fp32, where the model is."""
        device = next(self.model.parameters()).device
        ids, teacher = self.ids.to(device), self.teacher.to(device)
        layout = make_layout(self.model.sizes, ids.shape[1], device=device)
        hidden = teacher.model.lower(ids, layout)
        target = teacher.head(teacher.model.upper(hidden, layout, teacher=True)[0]).log_softmax(-1)
        found = self.model(ids, layout).log_softmax(-1)
        return float((target.exp() * (target - found)).sum(-1).mean())


def curve_of(variant: Variant, work: Path) -> list[list[float]]:
    """Return the (step, KL) points of a distilled variant."""
    return json.loads((work / "runs" / variant.slug / "held-out.json").read_text())


def rewired_of(variant: Variant, work: Path, subject: Subject = TINY) -> Path:
    """Return the checkpoint a row starts from, rewired if it is not there yet."""
    if variant.cut is None:
        return subject.teacher
    start = work / "rewired" / f"cut{variant.cut}-group{variant.group_size}-{variant.init}"
    if not start.exists():
        rewire_checkpoint(subject.teacher, start, RewireOptions(variant.cut, variant.group_size, variant.init))
    return start


def student_of(variant: Variant, work: Path, steps: int, device: str = "cpu", subject: Subject = TINY) -> Path:
    """Return the checkpoint of a row, distilled, or the distillation continued, if it is not there yet.

    One thread, so that a result of a CPU does not depend on its cores.
    """
    start = rewired_of(variant, work, subject)
    if not variant.is_trained:
        return start
    torch.set_num_threads(1)
    output, run = work / "students" / variant.slug, work / "runs" / variant.slug
    if output.exists():
        return output
    encode = FastEncoder(Tokenizer.from_file(str(subject.teacher / "tokenizer.json")))
    stage = subject.documents
    if variant.recipe != "all":
        stage = dataclasses.replace(stage, mix=RECIPES[variant.recipe])
    samples = write_samples(work / f"documents-{variant.recipe}.jsonl", stage, TINY_STUDENT.seed, encode)
    checkpoint = open_checkpoint(start)
    sizes = load_config(checkpoint.hf_config)
    data, _ = load_data(samples, start, sizes.vocab_size, DataSettings(TINY_STUDENT.distill.length))
    model = load_model(checkpoint, sizes, torch.float32, with_teacher=True)
    if variant.merged_heads:
        merge_heads(model)
    teacher = load_model(checkpoint, sizes, torch.float32, with_teacher=True)
    curve = Curve(run / "held-out.json", model, teacher, subject)
    if not curve.file.is_file():
        curve({"step": 0})
    config = dataclasses.replace(
        TINY_STUDENT.distill, early_exit=False, train=variant.train, max_steps=steps, seed=variant.seed, device=device
    )
    distill(config, model, data, run, on_step=curve, progress=False)
    weights = model.cpu().state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    trained = {name: weights[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    export_checkpoint(checkpoint, output, shapes, trained, sizes.cut)
    return output


def make_students(
    variants: Sequence[Variant], work: Path, steps: int, jobs: int, device: str = "cpu", subject: Subject = TINY
) -> None:
    """Rewire and distil every row, ``jobs`` at a time, each on one thread, or on one GPU with device ``cuda``."""
    for variant in variants:
        rewired_of(variant, work, subject)
    make_all(student_of, [(variant, work, steps, device, subject) for variant in variants], jobs, "students")
