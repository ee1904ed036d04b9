"""The small form of ``perf.gpu.student``'s files: the tiny teacher, and prompts and texts of this project's pages."""

import json
import shutil
from pathlib import Path

from kvforge.tokenization.template_files import CHAT_TEMPLATE
from perf.gpu.student_files import Files
from perf.harness.engines import ROOT, TEACHER_DIR

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_files(folder: Path) -> Files:
    """Write the files to ``folder``, unless they are there."""
    files = Files(folder)
    if not folder.exists():
        shutil.copytree(TEACHER_DIR, folder / "checkpoint")
        (folder / "checkpoint" / CHAT_TEMPLATE).write_text(TEMPLATE)
        page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
        for name in ("train", "held-out"):
            (folder / "texts" / name).mkdir(parents=True)
        middle = len(page) // 2
        (files.train / "wiki.txt").write_text(page[:middle])
        for kind, text in (("one", page[middle:]), ("two", page[::-1][:4000])):
            (folder / "texts" / "held-out" / f"{kind}.txt").write_text(text)
        write_rows(files.train / "texts.jsonl", [{"text": page[:1000]}, {"text": page[1000:2000]}])
        prompts = [[{"role": "user", "content": f"What is {number} + 1?"}] for number in range(6)]
        write_rows(files.train / "prompts.jsonl", [{"messages": messages} for messages in prompts])
    return files


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write a line of JSON a row."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
