"""What a cut costs hybrids: tiny models of each kind of layers with a state, beside one with attention alone.

    python -m perf.quality.hybrid_cuts --output perf/results/hybrid-cuts-quality

Of eight layers two have attention, one on each side of the cut at four; of the model without states all have. Each is
trained here on documents that are mostly looked up (pairs of words, then the questions of the tiny models), and
rewired, for ``ridge`` with 64 other documents of the kind; then its student is distilled on others again. What is said
is of documents that nothing was trained on: the mean loss of a token, KL(teacher, student) in nats, the share of tokens
with the same argmax, and the share of right tokens of answers, given those before them. Runs continue in --work.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from kvforge.checkpoint.model import open_model
from kvforge.distill import DistillConfig
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from model_defs import ModelConfig, load_config
from perf.harness.experiment import Experiment, Report, number, output, work
from perf.harness.options import chosen
from perf.training.config import HYBRID_SIZES, HYBRIDS, TINY_HF_CONFIG, Stage, StudentConfig, TeacherConfig
from perf.training.documents import ANSWER_WEIGHT, Batch, Encode, make_batch
from perf.training.export import export_checkpoint
from perf.training.student import make_student
from perf.training.teacher import new_model, train_teacher
from perf.training.tokenizer import FastEncoder

TOKENIZER = Path("model_defs/assets/tiny-teacher/tokenizer.json")
CUT = 4
CALIBRATION = 64
DOCUMENTS = Stage(64, 8, max_steps=1, first_weight=2.0, min_density=0.6, num_misfits=4, pair_share=0.25, lr_end=0.1)


def initial(config: ModelConfig, seed: int) -> SwiftKVForCausalLM:
    """A model before training, whose states forget at many rates."""
    model, generator = new_model(config, seed), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.rand(parameter.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("A_log"):
                parameter.copy_((1 + 15 * drawn).log())
            elif name.endswith("dt_bias"):
                parameter.copy_((1e-3 * 100**drawn).expm1().log())
            elif name.endswith("conv1d.weight"):
                parameter.copy_((2 * drawn - 1) * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias") or (
                name.endswith("norm.weight") and "linear_attn" not in name and config.norm_offset
            ):
                parameter.zero_()
    return model


def teacher_of(name: str, folder: Path, encode: Encode, tokenizer: Tokenizer, args: argparse.Namespace) -> Path:
    """Return the checkpoint of a trained model."""
    made, hf = folder / "teacher", TINY_HF_CONFIG | HYBRID_SIZES | HYBRIDS[name]
    config = load_config(hf)
    if not made.exists():
        stage = Stage(**{**vars(DOCUMENTS), "max_steps": args.steps})
        recipe = TeacherConfig(config, (stage,), warmup_steps=20, threads=1, checkpoint_every=50)
        if not (folder / "start").exists():
            export_checkpoint(initial(config, recipe.seed).state_dict(), hf, tokenizer, folder / "start")
        model, _ = train_teacher(recipe, folder / "run", encode, start=folder / "start")
        export_checkpoint(model.state_dict(), hf, tokenizer, made)
    return made


def student_of(teacher: Path, folder: Path, encode: Encode, steps: int) -> Path:
    """Return the checkpoint of its distilled student."""
    config = DistillConfig(
        max_steps=steps, length=DOCUMENTS.length, batch_size=8, micro_batch=8, lr=2e-3, seed=1, device="cpu",
        dtype="float32",
    )  # fmt: skip
    documents = Stage(**{**vars(DOCUMENTS), "sequences": 8 * steps})
    recipe = StudentConfig(RewireOptions(CUT, init="fold"), documents, config)
    return make_student(recipe, teacher, folder / "student", encode)


def calibration_text(folder: Path, encode: Encode, tokenizer: Tokenizer) -> Path:
    """Return a file of documents that no model was trained on and none is compared on."""
    batch = make_batch("calibration", Stage(**{**vars(DOCUMENTS), "sequences": CALIBRATION}), encode)
    file = folder / "calibration.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(tokenizer.decode(row.tolist()) for row in batch.input_ids), encoding="utf-8")
    return file


def loaded(path: Path) -> SwiftKVForCausalLM:
    """Return the model of a checkpoint in float32."""
    checkpoint = open_model(path)
    return load_model(checkpoint, load_config(checkpoint.hf_config), torch.float32)


@torch.no_grad()
def compared(teacher: SwiftKVForCausalLM, model: SwiftKVForCausalLM, batch: Batch) -> dict[str, float]:
    """Return what the module's text names, of tokens that are no padding."""
    counted, answers = batch.weight > 0, batch.weight >= ANSWER_WEIGHT
    expected, found = (each(batch.input_ids).double().log_softmax(-1) for each in (teacher, model))
    loss = F.nll_loss(found[counted], batch.targets[counted])
    kl = (expected.exp() * (expected - found)).sum(-1)[counted].mean()
    same = (found.argmax(-1) == expected.argmax(-1))[counted].double().mean()
    right = (found.argmax(-1) == batch.targets)[answers].double().mean()
    return {"loss": float(loss), "kl": max(float(kl), 0.0), "same": float(same), "right": float(right)}


def measure(args: argparse.Namespace) -> Report:
    """Train, rewire, distil and compare every model."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    encode, rows = FastEncoder(tokenizer), []
    torch.set_num_threads(1)
    held_out = Stage(**{**vars(DOCUMENTS), "sequences": args.held_out})
    batch = make_batch("held out", held_out, encode)
    for name in args.layers:
        folder = args.work / name.replace(" ", "-")
        path = teacher_of(name, folder, encode, tokenizer, args)
        checkpoints: Mapping[str, Path] = {init: folder / init for init in ("copy", "fold", "ridge")}
        text = calibration_text(args.work, encode, tokenizer)
        for init, made in checkpoints.items():
            if not made.exists():
                options = RewireOptions(CUT, init=init, num_samples=CALIBRATION, num_tokens=DOCUMENTS.length)
                rewire_checkpoint(path, made, options, calibration=text)
        student = student_of(path, folder, encode, args.distil_steps)
        teacher = loaded(path)
        ways = {"no cut": path, **checkpoints, "distilled": student}
        rows += [{"model": name, "cut": way, **compared(teacher, loaded(made), batch)} for way, made in ways.items()]
    return {
        "rows": rows,
        "tokens": int((batch.weight > 0).sum()),
        "answers": int((batch.weight >= ANSWER_WEIGHT).sum()),
    }


EXPERIMENT = Experiment(
    "perf.quality.hybrid_cuts", __doc__,
    options=(
        work(), chosen("--layers", list(HYBRIDS)), number("--steps", 120), number("--distil-steps", 40),
        number("--held-out", 32), output("OUTPUT.json and .md"),
    ),
    measure=measure, settings=("steps", "distil_steps"),
    title="What a cut costs hybrids",
    notes="Models of 8 layers, cut at 4, trained here for {steps} steps of 512 tokens; students are distilled for "
    "{distil_steps} such steps from init `fold`. {tokens} tokens of held-out documents, {answers} of them of answers. "
    "Models that were trained so briefly look little up, so this says less of others.",
    columns=(
        ("layers with a state", "model"), ("cut at half", "cut"), ("loss", "loss", ".3f"), ("KL", "kl", ".3f"),
        ("same argmax, %", "same", ".1f", 100), ("right answers, %", "right", ".1f", 100),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
