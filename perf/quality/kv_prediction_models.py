"""The models of ``perf.quality.kv_prediction``: predictors and SwiftKV models of the committed teacher."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvforge.compiler import BuildOptions
from kvforge.distill.packing import DataSettings
from kvforge.prediction.config import PredictConfig
from kvforge.prediction.run import FitOptions, train_predictor
from kvforge.prediction.truncate import truncate
from model_defs import load_config
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.processes import make_all
from perf.quality.swiftkv_students import rewired_of
from perf.quality.swiftkv_variants import Variant
from perf.training.config import TINY_HF_CONFIG, TINY_STUDENT, Stage, TeacherConfig
from perf.training.export import export_checkpoint
from perf.training.student_data import write_samples
from perf.training.teacher import train_teacher
from perf.training.tokenizer import FastEncoder

MAX_SEQ_LEN = 640
NUM_LAYERS = 4
STUDENT, ALONE = "distilled student", "independent model"
INDEPENDENT_CONFIG = TINY_HF_CONFIG | {"num_hidden_layers": NUM_LAYERS}
INDEPENDENT = TeacherConfig(
    model=load_config(INDEPENDENT_CONFIG),
    stages=(
        Stage(128, 64, 300, first_weight=5.0, min_density=0.6, num_misfits=4, pair_share=0.5, question_share=0.3),
        Stage(256, 32, 150, first_weight=5.0, min_density=0.4, num_misfits=3, pair_share=0.1),
        Stage(512, 16, 100, first_weight=5.0, min_density=0.2, num_misfits=2, lr_end=0.1),
    ),
    seed=7,
    threads=1,
)
"""An auxiliary model that shares nothing with the teacher but text and tokenizer: shapes of its lower layers, random
weights, trained as a language model."""


@dataclass(frozen=True)
class Predictor:
    """What is trained or, with 0 ``steps``, only fitted. The auxiliary model begins as the teacher's first
    ``NUM_LAYERS`` layers, or is the ``independent`` one. ``reads`` is the auxiliary layer of each of the teacher's,
    None for that at the same depth."""

    steps: int = 0
    is_independent: bool = False
    reads: tuple[int, ...] | None = None
    seed: int = 1

    @property
    def slug(self) -> str:
        """Name of the predictor's folders."""
        parts = ["independent" if self.is_independent else "lower", f"steps{self.steps}"]
        parts += [] if self.reads is None else ["reads" + "".join(map(str, self.reads))]
        return "-".join([*parts, f"seed{self.seed}"] if self.steps else parts)


def auxiliary_of(is_independent: bool, work: Path) -> Path:
    """Return the checkpoint of an auxiliary model, made, or its training continued, if it is not there yet."""
    output = work / "auxiliary" / ("independent" if is_independent else "lower")
    if output.exists():
        return output
    if not is_independent:
        truncate(TEACHER_DIR, output, NUM_LAYERS)
        return output
    tokenizer = Tokenizer.from_file(str(TEACHER_DIR / "tokenizer.json"))
    model, _ = train_teacher(INDEPENDENT, work / "runs" / "independent", FastEncoder(tokenizer))
    partial = output.with_suffix(".tmp")
    export_checkpoint(model.state_dict(), INDEPENDENT_CONFIG, tokenizer, partial)
    partial.replace(output)
    return output


def predictor_of(predictor: Predictor, work: Path) -> Path:
    """Return the predictor's checkpoint, made on the documents of the committed student, or its training continued, if
    it is not there yet. One thread."""
    output = work / "predictors" / predictor.slug
    if output.exists():
        return output
    torch.set_num_threads(1)
    loop, samples = TINY_STUDENT.distill, None
    if predictor.steps:
        encode = FastEncoder(Tokenizer.from_file(str(TEACHER_DIR / "tokenizer.json")))
        samples = write_samples(work / "documents.jsonl", TINY_STUDENT.documents, TINY_STUDENT.seed, encode)
        loop = dataclasses.replace(
            loop, early_exit=False, max_steps=predictor.steps, seed=predictor.seed, checkpoint_every=10
        )
    train_predictor(
        TEACHER_DIR, auxiliary_of(predictor.is_independent, work), output, samples, PredictConfig(loop),
        DataSettings(loop.length), FitOptions(num_tokens=256), layers=predictor.reads,
        work=work / "runs" / predictor.slug, progress=False,
    )  # fmt: skip
    return output


def make_predictors(predictors: Sequence[Predictor], work: Path, jobs: int) -> None:
    """Make every predictor, ``jobs`` at a time, each on one thread."""
    for is_independent in sorted({predictor.is_independent for predictor in predictors}):
        auxiliary_of(is_independent, work)
    make_all(predictor_of, [(predictor, work) for predictor in predictors], jobs, "predictors")


def predicting_engine(predictor: Predictor, work: Path) -> Path:
    """Return the teacher's engine with a predictor, built if it is not there yet."""
    checkpoint = predictor_of(predictor, work)
    return cached_engine(work / "engines" / predictor.slug, TEACHER_DIR, _options(kv_prediction=str(checkpoint)))


def plain_engine(model: int | str | None, work: Path) -> Path:
    """Return the teacher's engine (None), the committed student's, the independent auxiliary model's own, or that of
    the teacher rewired to a cut by ridge regression, without training."""
    if model is None:
        return cached_engine(work / "engines" / "teacher", TEACHER_DIR, _options())
    if isinstance(model, str):
        name, checkpoint = ("student", STUDENT_DIR) if model == STUDENT else ("alone", auxiliary_of(True, work))
        return cached_engine(work / "engines" / name, checkpoint, _options())
    variant = Variant(f"cut {model}", model, init="ridge", distilled=False)
    return cached_engine(work / "engines" / variant.slug, lambda: rewired_of(variant, work), _options())


def _options(**more: str) -> BuildOptions:
    return BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=MAX_SEQ_LEN, early_exit=False, **more)
