"""The models of ``perf.quality.kv_prediction``: predictors and SwiftKV models of the committed teacher."""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvforge.compiler import BuildOptions
from kvforge.distill.packing import DataSettings
from kvforge.prediction.config import PredictConfig
from kvforge.prediction.run import FitOptions, train_predictor
from kvforge.prediction.truncate import truncate
from kvforge.training.config import TINY_STUDENT
from kvforge.training.student_data import write_samples
from kvforge.training.tokenizer import FastEncoder
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.quality.swiftkv_students import rewired_of
from perf.quality.swiftkv_variants import Variant

MAX_SEQ_LEN = 640
NUM_LAYERS = 4
STUDENT = "distilled student"


def predictor_of(reads: tuple[int, ...] | None, steps: int, work: Path) -> Path:
    """Return the predictor whose auxiliary model begins as the teacher's first ``NUM_LAYERS`` layers, trained on the
    documents of the committed student, or the training continued, if it is not there yet; with 0 steps its maps are
    fitted and nothing is trained. ``reads`` is the auxiliary layer of each of the teacher's, None for that at the same
    depth. One thread."""
    name = f"auxiliary-{NUM_LAYERS}-steps-{steps}" + ("" if reads is None else f"-{''.join(map(str, reads))}")
    output, auxiliary = work / "predictors" / name, work / f"auxiliary-{NUM_LAYERS}"
    if output.exists():
        return output
    torch.set_num_threads(1)
    if not auxiliary.exists():
        truncate(TEACHER_DIR, auxiliary, NUM_LAYERS)
    loop, samples = TINY_STUDENT.distill, None
    if steps:
        encode = FastEncoder(Tokenizer.from_file(str(TEACHER_DIR / "tokenizer.json")))
        samples = write_samples(work / "documents.jsonl", TINY_STUDENT.documents, TINY_STUDENT.seed, encode)
        loop = dataclasses.replace(loop, early_exit=False, max_steps=steps, dtype="fp32", checkpoint_every=10)
    train_predictor(
        TEACHER_DIR,
        auxiliary,
        output,
        samples,
        PredictConfig(loop),
        DataSettings(loop.length),
        FitOptions(num_tokens=256),
        layers=reads,
        work=work / "runs" / name,
        progress=False,
    )
    return output


def predicting_engine(reads: tuple[int, ...] | None, steps: int, work: Path) -> Path:
    """Return the teacher's engine with a predictor, built if it is not there yet."""
    predictor = predictor_of(reads, steps, work)
    return cached_engine(work / "engines" / predictor.name, TEACHER_DIR, _options(kv_prediction=str(predictor)))


def plain_engine(model: int | str | None, work: Path) -> Path:
    """Return the teacher's engine (None), the committed student's, or that of the teacher rewired to a cut by ridge
    regression, without training."""
    if model is None:
        return cached_engine(work / "engines" / "teacher", TEACHER_DIR, _options())
    if isinstance(model, str):
        return cached_engine(work / "engines" / "student", STUDENT_DIR, _options())
    variant = Variant(f"cut {model}", model, init="ridge", distilled=False)
    return cached_engine(work / "engines" / variant.slug, lambda: rewired_of(variant, work), _options())


def _options(**more: str) -> BuildOptions:
    return BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=MAX_SEQ_LEN, early_exit=False, **more)
