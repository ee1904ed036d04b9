"""Every benchmark is a program of one kind: it stands in a folder of its subject and has the harness' parser."""

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

PERF = Path(__file__).resolve().parents[3] / "perf"
WORKERS = {
    "peers/gguf_worker.py",
    "peers/kvforge_worker.py",
    "peers/llama_prefix_worker.py",
    "peers/llama_worker.py",
    "peers/openvino_worker.py",
    "peers/pace_worker.py",
    "peers/transformers_worker.py",
    "peers/vllm_prefix_worker.py",
    "peers/vllm_worker.py",
    "gpu/queue/child.py",
}
"""They parse nothing: ``perf.peers.compare`` starts them with one argument, most by a python without kvforge,
``perf.peers.gguf`` and ``perf.peers.restored_prefixes`` with more, and ``perf.gpu.quarter`` with another program's."""


def is_program(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)


def programs() -> list[str]:
    files = {str(path.relative_to(PERF)): ast.parse(path.read_text()) for path in sorted(PERF.rglob("*.py"))}
    return [name for name, tree in files.items() if is_program(tree) and name not in WORKERS]


def test_the_programs_are_found() -> None:
    found = programs()
    assert len(found) > 30 and "engine/variants.py" in found and all((PERF / name).is_file() for name in WORKERS)


def test_nothing_lies_outside_of_a_subject() -> None:
    assert not list(PERF.glob("*.py"))


@pytest.mark.parametrize("name", programs())
def test_a_program_has_the_harness_parser_and_names_its_own_command(name: str) -> None:
    text = (PERF / name).read_text()
    names = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    assert {"Experiment", "make_parser", "harness_parser", "gpu_parser"} & {*names}
    module = f"perf.{name.removesuffix('.py').replace('/', '.')}"
    assert f"python -m {module}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f"`python -m {module}`" in (PERF / "README.md").read_text()


def test_parsers_are_made_in_the_harness_alone() -> None:
    makers = {str(path.relative_to(PERF)) for path in PERF.rglob("*.py") if "ArgumentParser(" in path.read_text()}
    assert makers == {"harness/command.py"}


def test_a_declaration_writes_the_markdown_that_its_option_names() -> None:
    named, written = {}, {}
    for name in programs():
        _, _, declared = (PERF / name).read_text().partition("EXPERIMENT = Experiment(")
        files = re.search(r'output\("([^"]*)"', declared)
        if files and "keep=" not in declared:
            named[name], written[name] = ".md" in files[1], "is_plain=True" not in declared
    assert named == written and {True, False} == {*named.values()}


def strings(value: Any) -> Iterator[str]:
    """All texts in JSON-ready data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


def recorded_commands() -> dict[str, str]:
    """The commands that reports say they were made with, and a file of each; without those that leave names out."""
    found: dict[str, str] = {}
    for path in sorted((PERF / "results").rglob("*")):
        if path.suffix == ".json":
            texts = (text for text in strings(json.loads(path.read_text())) if text.startswith("python -m perf."))
            found |= dict.fromkeys(texts, path.name)
        elif path.suffix == ".md":
            found |= dict.fromkeys(re.findall(r"`(python -m perf\.[^`]*)`", path.read_text()), path.name)
    return {command: file for command, file in found.items() if " ... " not in command}


def unquoted(commands: Iterable[str]) -> list[str]:
    """Those in which an argument with a space stands bare: it ends in a comma, or another command quotes it."""
    words = {command: shlex.split(command) for command in commands}
    phrases = {word for given in words.values() for word in given if " " in word}

    def is_bare(given: list[str]) -> bool:
        line = " ".join(["", *(word for word in given if " " not in word), ""])
        return ", " in line or any(f" {phrase} " in line for phrase in phrases)

    return [command for command, given in words.items() if is_bare(given)]


def test_recorded_commands_can_be_pasted_back() -> None:
    found = recorded_commands()
    assert len(found) > 100
    assert {command: found[command] for command in unquoted(found)} == {}


def test_a_bare_argument_is_found() -> None:
    assert unquoted(["a --only 'no cut'", "a --only no cut", "a --only cut 8, 4-way", "a no --cut"]) == [
        "a --only no cut", "a --only cut 8, 4-way",
    ]  # fmt: skip
