"""Texts and instructions for SwiftKV students of a real model: what they are distilled on, and what they are judged on.

    python -m perf.real_model.texts SOURCES OUTPUT [--prompts-per-template 64]

SOURCES has checkouts of public repositories, of which nothing is kept here: ``examples`` (pytorch/examples:
WikiText-2), ``char-rnn`` (karpathy/char-rnn: Shakespeare), ``self-instruct`` (yizhongw/self-instruct: prompts of T0,
instructions), ``stanford_alpaca`` (tatsu-lab/stanford_alpaca: seed tasks), ``grade-school-math``
(openai/grade-school-math: GSM8K). The rest is Python's own library and this project's pages. OUTPUT gets ``train/``
and ``held-out/``, with a text for each kind and ``prompts.jsonl``, a conversation a line, in ``train/`` also all
texts as rows of data, ``texts.jsonl``, and ``texts.json``, which says how much each is and its sha256. Nothing that
is held out is trained on.
"""

import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvforge.common.errors import KvforgeError
from perf.harness.command import make_parser, run_main
from perf.harness.engines import ROOT
from perf.harness.files import write_json
from perf.harness.options import number, place

HELD_OUT_MODULES = ("argparse.py", "tarfile.py", "statistics.py", "zipfile.py", "shutil.py", "logging/__init__.py")
HELD_OUT_SHARE = 10
"""The last tenth of Shakespeare is held out."""
ROW = 3000
"""Characters of a row of training data."""
LONGEST_PROMPT = 2000
"""Characters of a prompt at most, so that a prompt and its answer fit 1024 tokens."""


def wiki(path: Path) -> str:
    """Return WikiText's words as running text: it is stored with spaces around marks."""
    text = re.sub(r" @(.)@ ", r"\1", path.read_text(encoding="utf-8"))
    text = re.sub(r" ([.,;:!?)\]%'’])", r"\1", text)
    return re.sub(r"([(\[$]) ", r"\1", text)


def modules(held_out: bool) -> str:
    """Return the sources of Python's library at its top, or those that are held out."""
    library = Path(sysconfig.get_path("stdlib"))
    chosen = [library / name for name in HELD_OUT_MODULES]
    if not held_out:
        chosen = [path for path in sorted(library.glob("*.py")) if path not in chosen]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in chosen)


def template_prompts(folder: Path, each: int, seed: int = 0) -> Iterator[str]:
    """Yield prompts of T0's templates, at most ``each`` of a template."""
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line)["prompt"].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        yield from random.Random(f"{seed}/{path.name}").sample(lines, min(each, len(lines)))


def questions(path: Path) -> Iterator[str]:
    """Yield GSM8K's questions."""
    yield from (json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines())


def instructions(path: Path) -> Iterator[str]:
    """Yield instructions with their first input, where they have one."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield "\n\n".join(filter(None, (row["instruction"].strip(), row["instances"][0]["input"].strip())))


def write_rows(path: Path, texts: Iterable[str]) -> None:
    """Write texts as rows of training data, as much of each as of the shortest."""
    whole = list(texts)
    least = min(map(len, whole))
    pieces = [text[begin : min(begin + ROW, least)] for text in whole for begin in range(0, least, ROW)]
    lines = (json.dumps({"text": piece}) for piece in pieces)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_prompts(path: Path, prompts: Iterable[str]) -> None:
    """Write those that are not too long as conversations, in an order that only they decide."""
    kept = sorted({prompt for prompt in prompts if 0 < len(prompt) <= LONGEST_PROMPT})
    random.Random(0).shuffle(kept)
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in kept)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_texts(sources: Path, output: Path, prompts_per_template: int) -> dict[str, dict[str, object]]:
    """Write all files; returns characters and sha256 of each by its place in ``output``."""
    train, held_out = output / "train", output / "held-out"
    for folder in (train, held_out):
        folder.mkdir(parents=True, exist_ok=True)
    wikitext = sources / "examples/word_language_model/data/wikitext-2"
    play = (sources / "char-rnn/data/tinyshakespeare/input.txt").read_text(encoding="utf-8")
    cut = len(play) // HELD_OUT_SHARE * (HELD_OUT_SHARE - 1)
    math = sources / "grade-school-math/grade_school_math/data"
    told = sources / "self-instruct"
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    for path, text in (
        (train / "wiki.txt", wiki(wikitext / "valid.txt")),
        (train / "book.txt", play[:cut]),
        (train / "code.txt", modules(held_out=False)),
        (held_out / "wiki.txt", wiki(wikitext / "test.txt")),
        (held_out / "book.txt", play[cut:]),
        (held_out / "code.txt", modules(held_out=True)),
        (held_out / "docs.txt", "\n\n".join(pages)),
    ):
        path.write_text(text, encoding="utf-8")
    write_rows(train / "texts.jsonl", (path.read_text(encoding="utf-8") for path in sorted(train.glob("*.txt"))))
    templates = template_prompts(told / "data/finetuning/t0_train_50k/data_per_template", prompts_per_template)
    write_prompts(train / "prompts.jsonl", [*templates, *questions(math / "train.jsonl")])
    seeds = sources / "stanford_alpaca/seed_tasks.jsonl"
    asked = [*instructions(told / "human_eval/user_oriented_instructions.jsonl"), *instructions(seeds)]
    write_prompts(held_out / "prompts.jsonl", [*asked, *list(questions(math / "test.jsonl"))[: 500 - len(asked)]])
    files = sorted(path for folder in (train, held_out) for path in folder.iterdir())
    return {str(path.relative_to(output)): _describe(path) for path in files}


def _describe(path: Path) -> dict[str, object]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def main() -> int:
    """Write the texts."""
    given = place("sources"), place("output"), number("--prompts-per-template", 64, metavar="N")
    args = make_parser(__doc__, *given).parse_args()
    try:
        found = write_texts(args.sources, args.output, args.prompts_per_template)
    except OSError as error:
        raise KvforgeError(f"{error.filename} cannot be read ({error.strerror}); SOURCES needs it.") from None
    write_json(args.output / "texts.json", found)
    for name, row in found.items():
        print(f"{row['bytes']:>10} {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
