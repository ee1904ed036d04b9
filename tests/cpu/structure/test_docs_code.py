"""The code on the pages: commands are parsed by the real parsers, programs compile, and what they name is there."""

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvforge
from kvforge.bench.workload import load_workloads
from kvforge.cli import make_parser
from kvforge.runtime import LLMEngine
from tests.support.pages import ROOT, WITH_COMMANDS, blocks, kvforge_lines, name, shell_lines

FILES = re.compile(r"(?<![\w./-])(?:tests|docs|plugins|model_defs|build|triton_repo|perf)/[\w./-]*[\w-]")
OURS = ("kvforge", "model_defs", "plugins", "perf", "tests")
SNIPPETS_KNOW = {"LLM", "AsyncLLM", "SamplingParams", "SpeculativeConfig"}
"""Names that parts of programs use without importing them."""


def parsed(line: str) -> argparse.Namespace:
    """What the real parser makes of a command line up to the shell's next operator; options in brackets count."""
    words = shlex.split(line.replace("[", " ").replace("]", " "), comments=True)
    end = next((at for at, word in enumerate(words) if re.match(r"[|>&]|\d>", word)), len(words))
    return make_parser().parse_args(words[:end])


def keywords_of(called: Callable[..., Any]) -> set[str]:
    """The keyword arguments of a function or class; ``LLM`` and ``AsyncLLM`` hand theirs on."""
    own = {*inspect.signature(called).parameters}
    return own if "engine_options" not in own else own | {"build_options", *inspect.signature(LLMEngine).parameters}


def wrong_names(block: str) -> list[str]:
    """The imports of ours that a program makes in vain, and arguments that what it calls does not take."""
    tree = compile(block, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    known, wrong = {name: getattr(kvforge, name) for name in SNIPPETS_KNOW}, list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            wrong += [alias.name for alias in node.names if not hasattr(module, alias.name)]
            known |= {alias.asname or alias.name: getattr(module, alias.name, None) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(known.get(node.func.id)):
            takes = keywords_of(known[node.func.id])
            wrong += [f"{node.func.id}({word.arg})" for word in node.keywords if word.arg and word.arg not in takes]
    return wrong


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_are_parsed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in kvforge_lines(page.read_text(encoding="utf-8")):
        try:
            parsed(line)
        except SystemExit as ended:
            assert not ended.code, f"kvforge {line}: {capsys.readouterr().err}"


def test_a_command_that_is_not_parsed_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("build X -o", "serve X --http-port [many]", "predict X", "plan --model a b"):
        with pytest.raises(SystemExit):
            parsed(line)
    text = "    A=1 kvforge serve X\n\n```\npython -m kvforge build X \\\n  -o Y\n```\n```python\nkvforge x\n```\n"
    assert [line.split() for line in kvforge_lines(text)] == [["build", "X", "-o", "Y"], ["serve", "X"]]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_modules_make_targets_and_files_of_commands_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    missing = []
    for line in shell_lines(page.read_text(encoding="utf-8")):
        modules = [found for found in re.findall(r"python\S* -m ([\w.]+)", line) if found.startswith(OURS)]
        missing += [module for module in modules if importlib.util.find_spec(module) is None]
        if found := re.match(r"\s*make ([\w-]+)", line):
            missing += [] if re.search(rf"^{found[1]}\b.*:", makefile, re.MULTILINE) else [line]
        missing += [file for file in FILES.findall(line) if not (ROOT / file).exists() and "perf/results" not in file]
    assert missing == []


@functools.cache
def options_of_benchmarks() -> frozenset[str]:
    """The options that programs of ``perf`` have, of all together."""
    texts = (file.read_text(encoding="utf-8") for file in (ROOT / "perf").rglob("*.py"))
    return frozenset(option for text in texts for option in re.findall(r"""["'](--?[a-z][\w-]*)["']""", text))


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_options_of_benchmarks_exist(page: Path) -> None:
    wrong = []
    for line in shell_lines(page.read_text(encoding="utf-8")):
        if found := re.search(r"python\S* -m perf[\w.]* (.*)", line):
            words = shlex.split(found[1], comments=True)
            used = {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)}
            wrong += [(line, option) for option in used - options_of_benchmarks()]
    assert wrong == []


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_shell_blocks_are_read_by_a_shell(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "bash", "sh"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_programs_compile_and_what_they_import_is_there(page: Path) -> None:
    found = {block: wrong_names(block) for block in blocks(page.read_text(encoding="utf-8"), "python")}
    assert {block: wrong for block, wrong in found.items() if wrong} == {}


def test_a_name_that_is_not_there_is_found() -> None:
    block = "from kvforge import LLM, Gone\nawait LLM('E', kv_cache_gb=3)\nSamplingParams(max_token=3)\n"
    assert sorted(wrong_names(block)) == ["Gone", "LLM(kv_cache_gb)", "SamplingParams(max_token)"]


def test_workloads_of_the_first_page_fit_its_model() -> None:
    """The page says that its lines can be tried with the tiny teacher."""
    config = json.loads((ROOT / "model_defs/assets/tiny-teacher/config.json").read_text())
    lines = list(kvforge_lines((ROOT / "docs/getting-started.md").read_text(encoding="utf-8")))
    given = [args for line in lines if line.startswith("bench ") and (args := parsed(line)).workloads]
    assert given
    for args in given:
        for workload in load_workloads(ROOT / args.workloads, args.only):
            assert workload.input_tokens + workload.output_tokens <= config["max_position_embeddings"]
