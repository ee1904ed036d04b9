"""The tiny teacher and student: `python -m kvforge.training.tiny {tokenizer,teacher,student,export,score}`.

`teacher` and `student` continue where an interrupted run stopped; with `--restart` they begin anew.
"""

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvforge.evaluation import evaluate, score_table
from kvforge.tasks import TASKS
from kvforge.training.checkpoint import load_state
from kvforge.training.config import TINY_MODEL, TINY_STUDENT, TINY_TEACHER, TINY_TOKENIZER
from kvforge.training.distill import distill_student
from kvforge.training.export import export_checkpoint, load_checkpoint
from kvforge.training.generate import PlainGenerator
from kvforge.training.model import LanguageModel
from kvforge.training.teacher import train_teacher
from kvforge.training.tokenizer import FastEncoder, save_tokenizer, train_tokenizer

ASSETS = ("tiny-teacher", "tiny-swiftkv")


def load_tokenizer(work: Path) -> Tokenizer:
    """The tokenizer of the run, trained now if there is none yet."""
    path = work / "tokenizer" / "tokenizer.json"
    if not path.exists():
        tokenizer = train_tokenizer(TINY_TOKENIZER.vocab_size, TINY_TOKENIZER.seed, TINY_TOKENIZER.num_items)
        save_tokenizer(tokenizer, path.parent, TINY_MODEL.max_position)
    return Tokenizer.from_file(str(path))


def load_weights(path: Path, model: LanguageModel) -> LanguageModel:
    """`model` with the weights of a training state. Raises SystemExit when there is none."""
    state = load_state(path)
    if state is None:
        raise SystemExit(f"{path} does not exist; train that model first")
    model.load_state_dict(state["weights"])
    return model


def load_trained(work: Path) -> tuple[LanguageModel, LanguageModel]:
    """Teacher and student as trained so far."""
    teacher = load_weights(work / "teacher" / "state.pt", LanguageModel(TINY_MODEL))
    student_config = TINY_MODEL.with_cut(TINY_STUDENT.cut, TINY_STUDENT.group_size)
    return teacher, load_weights(work / "student" / "state.pt", LanguageModel(student_config))


def score(directory: Path, tasks: list[str], length: int, num_prompts: int) -> str:
    """Table of exact matches with the plain model in bf16; slow for long answers, `kvforge eval` is the fast way."""
    model, tokenizer = load_checkpoint(directory, torch.bfloat16)
    generator = PlainGenerator(model, tokenizer)
    return score_table([evaluate(task, length, num_prompts, 0, generator.count_tokens, generator) for task in tasks])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvforge.training.tiny",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("tokenizer", "teacher", "student", "export", "score"))
    parser.add_argument("--work", type=Path, default=Path("runs/tiny"), help="folder of checkpoints and metrics")
    parser.add_argument("--out", type=Path, default=Path("model_defs/assets"), help="folder of the exported models")
    parser.add_argument("--restart", action="store_true", help="forget an earlier run of this step")
    parser.add_argument("--task", action="append", choices=list(TASKS), help="task to score (default needle_single)")
    parser.add_argument("--length", type=int, default=1000, help="prompt length to score at (default 1000)")
    parser.add_argument("--num-prompts", type=int, default=200, help="prompts per task to score (default 200)")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.work)
    if args.restart and args.what in ("teacher", "student"):
        shutil.rmtree(args.work / args.what, ignore_errors=True)
    if args.what == "teacher":
        train_teacher(TINY_TEACHER, args.work / "teacher", FastEncoder(tokenizer))
    elif args.what == "student":
        teacher = load_weights(args.work / "teacher" / "state.pt", LanguageModel(TINY_MODEL))
        distill_student(TINY_STUDENT, teacher, args.work / "student", FastEncoder(tokenizer))
    elif args.what == "export":
        for model, name in zip(load_trained(args.work), ASSETS, strict=True):
            export_checkpoint(model, tokenizer, args.out / name)
    elif args.what == "score":
        for name in ASSETS:
            table = score(args.out / name, args.task or ["needle_single"], args.length, args.num_prompts)
            print(f"{name}\n{table}")


if __name__ == "__main__":
    main()
