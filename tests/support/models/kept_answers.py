"""What programs of ``tests/`` say or make of what the product compiles, kept on the shelf: what sources alone decide is
computed once for all runs of a tree, as engines are built once."""

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.support.import_graph import imported_modules, module_name
from tests.support.models.shelf import BUILT_FROM, ROOT, shared_folder

ANSWER = "answer.json"
PRODUCT = ("kvforge", "model_defs", "plugins")


def kept_answer(program: str, question: Any, ask: Callable[[], Any], distributions: Sequence[str] = ()) -> Any:
    """Return the JSON that ``ask()`` gives, of an earlier run where nothing that decides it has changed since.

    Args:
        program: the module that answers; it, and what it imports of ``tests/`` and of ``BUILT_FROM``, decides.
        question: what it is asked, as JSON.
        ask: runs the program.
        distributions: installed ones whose versions decide too, besides those that decide engines.
    """

    def write(folder: Path) -> None:
        (folder / ANSWER).write_text(json.dumps(ask()), encoding="utf-8")

    return json.loads((kept_folder(program, question, write, distributions) / ANSWER).read_text(encoding="utf-8"))


def kept_answers(
    program: str,
    questions: Sequence[Any],
    ask: Callable[[Sequence[Any]], Iterable[Any]],
    distributions: Sequence[str] = (),
) -> list[Any]:
    """Return an answer to each of ``questions``. Those that are not kept are asked in one call, and each answer is kept
    when it comes: ``ask`` gives them in the order of its questions."""
    decides = _decides(program, distributions)
    folders = [_folder(decides, program, question) for question in questions]
    missing = [index for index, folder in enumerate(folders) if not folder.is_dir()]
    if missing:
        for index, answer in zip(missing, ask([questions[index] for index in missing]), strict=True):
            text = json.dumps(answer)
            _keep(folders[index], lambda new, text=text: (new / ANSWER).write_text(text, encoding="utf-8"))
    return [json.loads((folder / ANSWER).read_text(encoding="utf-8")) for folder in folders]


def kept_folder(program: str, question: Any, fill: Callable[[Path], object], distributions: Sequence[str] = ()) -> Path:
    """Return the directory that ``fill`` makes the content of, of an earlier run likewise. Nobody writes into it."""
    return _keep(_folder(_decides(program, distributions), program, question), fill)


def _decides(program: str, distributions: Sequence[str]) -> bytes:
    """A digest of all that decides what a program answers, but for the question."""
    digest = hashlib.sha256()
    for file in sources(program):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    for name in distributions:
        digest.update(f"{name} {importlib.metadata.version(name)}\0".encode())
    return digest.digest()


def _folder(decides: bytes, program: str, question: Any) -> Path:
    digest = hashlib.sha256(decides + json.dumps([program, question]).encode()).hexdigest()
    return shared_folder() / f"{program.rpartition('.')[2]}-{digest[:16]}"


def _keep(kept: Path, fill: Callable[[Path], object]) -> Path:
    with FileLock(f"{kept}.lock"):
        if not kept.is_dir():
            half = kept.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir()
            fill(half)
            half.rename(kept)
    return kept


def sources(program: str) -> list[Path]:
    """Return the files of ``tests/`` that a module consists of: its own, and those that it imports, however far.

    Raises:
        ValueError: one imports a part of the product that does not decide what is on the shelf.
    """
    files = {module_name(file.relative_to(ROOT)): file for file in (ROOT / "tests").rglob("*.py")}
    decisive = tuple(name.removesuffix(".py").replace("/", ".") for name in BUILT_FROM)
    found: set[str] = set()
    left = [program]
    while left:
        module = left.pop()
        if module in found:
            continue
        found.add(module)
        for name in imported_modules(files[module], files):
            if name in files:
                left.append(name)
            elif name.split(".")[0] in PRODUCT and not f"{name}.".startswith(tuple(f"{part}." for part in decisive)):
                raise ValueError(f"{module} imports {name}, which decides nothing on the shelf: add it to BUILT_FROM.")
    return sorted(files[module] for module in found)
