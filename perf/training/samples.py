"""Write small files to try `rewire`, `distill` and `eval` on the tiny teacher.

python -m perf.training.samples
"""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from kvforge.tasks.prompt import Example, make_example
from perf.harness.command import make_parser

TASKS = ("needle_single", "needle_multi", "variables", "list_recall", "amounts")
"""Those that the tiny teacher has learned, wholly or in part."""

LENGTH = 200
"""Tokens of a prompt."""
NUM_ROWS = 240
NUM_DOCUMENTS = 120
TRAIN, TEXT, HELD_OUT = "train.jsonl", "text.txt", "held-out.txt"


def make_samples(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the contents of the files by name. No prompt is in two of them."""

    def examples(name: str, num: int) -> list[Example]:
        made = []
        for index in range(num):
            rng = random.Random(f"samples/{name}/{index}")
            made.append(make_example(rng.choice(TASKS), LENGTH, lambda text: len(tokenizer.encode(text).ids), rng))
        return made

    rows = [{"prompt": each.prompt, "completion": f" {each.answer}."} for each in examples(TRAIN, NUM_ROWS)]
    texts = {
        name: "\n\n".join(f"{each.prompt} {each.answer}." for each in examples(name, NUM_DOCUMENTS)) + "\n"
        for name in (TEXT, HELD_OUT)
    }
    return {TRAIN: "".join(json.dumps(row) + "\n" for row in rows), **texts}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=Path, default=Path("model_defs/assets"), help="folder of tiny-teacher")
    args = parser.parse_args()
    folder = args.models / "samples"
    folder.mkdir(exist_ok=True)
    for name, content in make_samples(Tokenizer.from_file(str(args.models / "tiny-teacher/tokenizer.json"))).items():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
