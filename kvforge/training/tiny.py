"""The tiny teacher and student: `python -m kvforge.training.tiny {tokenizer,teacher,student}`.

`teacher` and `student` continue where an interrupted run stopped, and write their checkpoint to --out at the end; with
`--restart` they begin anew.
"""

import argparse
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from kvforge.training.config import TINY_HF_CONFIG, TINY_MODEL, TINY_STUDENT, TINY_TEACHER, TINY_TOKENIZER
from kvforge.training.export import export_checkpoint
from kvforge.training.student import make_student
from kvforge.training.teacher import train_teacher
from kvforge.training.tokenizer import FastEncoder, save_tokenizer, train_tokenizer


def load_tokenizer(work: Path) -> Tokenizer:
    """The tokenizer of the run, trained now if there is none yet."""
    path = work / "tokenizer" / "tokenizer.json"
    if not path.exists():
        tokenizer = train_tokenizer(TINY_TOKENIZER.vocab_size, TINY_TOKENIZER.seed, TINY_TOKENIZER.num_items)
        save_tokenizer(tokenizer, path.parent, TINY_MODEL.max_position)
    return Tokenizer.from_file(str(path))


def make_teacher(work: Path, out: Path, tokenizer: Tokenizer, device: str, workers: int) -> None:
    """Trains the teacher and writes `out`/tiny-teacher."""
    model, _ = train_teacher(TINY_TEACHER, work / "teacher", FastEncoder(tokenizer), device, workers)
    export_checkpoint(model.state_dict(), TINY_HF_CONFIG, tokenizer, out / "tiny-teacher")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvforge.training.tiny",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("tokenizer", "teacher", "student"))
    parser.add_argument("--work", type=Path, default=Path("runs/tiny"), help="folder of checkpoints and metrics")
    parser.add_argument("--out", type=Path, default=Path("model_defs/assets"), help="folder of the models")
    parser.add_argument("--restart", action="store_true", help="forget an earlier run of this step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the teacher (default %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="processes that make the teacher's text (default: none)")
    args = parser.parse_args()
    if args.restart:
        shutil.rmtree(args.work / args.what, ignore_errors=True)
    tokenizer = load_tokenizer(args.work)
    if args.what == "teacher":
        make_teacher(args.work, args.out, tokenizer, args.device, args.workers)
    elif args.what == "student":
        made = make_student(TINY_STUDENT, args.out / "tiny-teacher", args.work / "student", FastEncoder(tokenizer))
        shutil.copytree(made, args.out / "tiny-swiftkv", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
