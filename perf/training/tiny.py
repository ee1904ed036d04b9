"""Make the tiny models.

    python -m perf.training.tiny {tokenizer,teacher,student,chains}

`chains` trains the teacher on, until it follows chains of eight links. `teacher`, `student` and `chains` continue where
an interrupted run stopped, and write their checkpoint to --out at the end; with `--restart` they begin anew.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from perf.harness.command import make_parser
from perf.training.config import (
    CHAINS_TEACHER,
    TINY_HF_CONFIG,
    TINY_MODEL,
    TINY_STUDENT,
    TINY_TEACHER,
    TINY_TOKENIZER,
    TeacherConfig,
)  # fmt: skip
from perf.training.export import export_checkpoint
from perf.training.student import make_student
from perf.training.teacher import train_teacher
from perf.training.tokenizer import FastEncoder, save_tokenizer, train_tokenizer


def load_tokenizer(work: Path) -> Tokenizer:
    """The tokenizer of the run, trained now if there is none yet."""
    path = work / "tokenizer" / "tokenizer.json"
    if not path.exists():
        tokenizer = train_tokenizer(TINY_TOKENIZER.vocab_size, TINY_TOKENIZER.seed, TINY_TOKENIZER.num_items)
        save_tokenizer(tokenizer, path.parent, TINY_MODEL.max_position)
    return Tokenizer.from_file(str(path))


@dataclass(frozen=True)
class Teacher:
    """How it is trained, the checkpoint that comes of it, and that which it begins with (none: random weights)."""

    recipe: TeacherConfig
    name: str
    start: str | None = None


TEACHERS = {
    "teacher": Teacher(TINY_TEACHER, "tiny-teacher"),
    "chains": Teacher(CHAINS_TEACHER, "tiny-chains", start="tiny-teacher"),
}


def make_teacher(what: str, work: Path, out: Path, tokenizer: Tokenizer, device: str, workers: int) -> None:
    """Trains a teacher in `work` and writes its checkpoint below `out`."""
    made = TEACHERS[what]
    start = None if made.start is None else out / made.start
    model, _ = train_teacher(made.recipe, work / what, FastEncoder(tokenizer), device, workers, start=start)
    export_checkpoint(model.state_dict(), TINY_HF_CONFIG, tokenizer, out / made.name)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("tokenizer", *TEACHERS, "student"))
    parser.add_argument("--work", type=Path, default=Path("runs/tiny"), help="folder of checkpoints and metrics")
    parser.add_argument("--out", type=Path, default=Path("model_defs/assets"), help="folder of the models")
    parser.add_argument("--restart", action="store_true", help="forget an earlier run of this step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of a teacher (default %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="processes that make a teacher's text (default: none)")
    args = parser.parse_args()
    if args.restart:
        shutil.rmtree(args.work / args.what, ignore_errors=True)
    tokenizer = load_tokenizer(args.work)
    if args.what in TEACHERS:
        make_teacher(args.what, args.work, args.out, tokenizer, args.device, args.workers)
    elif args.what == "student":
        made = make_student(TINY_STUDENT, args.out / "tiny-teacher", args.work / "student", FastEncoder(tokenizer))
        shutil.copytree(made, args.out / "tiny-swiftkv", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
