"""Docstrings name what is there: modules, parameters, and other names in backquotes."""

import ast
import builtins
import functools
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("kvforge", "model_defs", "plugins", "triton_repo")
FOLDERS = (*PRODUCT, "perf")

QUOTED = re.compile(r"(?<!`)``?([A-Za-z_][\w.]*?)(?:\(\))?``?(?![`\w])")
OTHERS = {
    "W_UK": "a matrix of the paper",
    "W_UV": "a matrix of the paper",
    "LLTokenizer": "llguidance",
    "LLParserLimits": "llguidance",
    "EngineArgs": "vLLM",
    "multiprocessing": "Python",
    "Popen": "Python",
    "Authorization": "a header of HTTP",
    "enable_thinking": "a variable of chat templates",
    "max_token": "a misspelt field",
    "kv_b_proj_swiftkv": "a tensor of checkpoints",
    "kvforge.requests": "a logger",
    "triton_grpc_error": "a key of Triton's metadata",
    "plugins.__path__": "Python",
}
"""Names that the code does not have, and whose they are."""
TRANSFORMERS = re.compile(r"[A-Z]\w+Config")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """What a file's code names, what of that may be meant in other files, and its docstrings."""

    used: frozenset[str]
    defined: frozenset[str]
    texts: tuple[str, ...]
    unknown_parameters: tuple[str, ...]


def read(tree: ast.AST) -> Source:
    """Names of one word that are a local's, a field's or a parameter's mean nothing in other files."""
    used, defined, texts, unknown = set[str](), set[str](), list[str](), list[str]()
    docstrings = set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)) as constant):
                texts.append(text)
                docstrings.add(id(constant))
            case ast.Constant(value=str(text)) if id(node) not in docstrings and " " not in text.strip():
                defined.update(re.findall(r"\w+", text))
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                defined.add(node.name)
                unknown += without_parameter(node)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                (defined if "_" in name.strip("_") else used).add(name)
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                used.add(name)
            case ast.alias(name=name):
                used.update((*name.split("."), node.asname or ""))
            case ast.ImportFrom(module=str(name)):
                used.update(name.split("."))
    return Source(frozenset(used | defined), frozenset(defined), tuple(texts), tuple(unknown))


def without_parameter(node: ast.ClassDef | FUNCTION) -> Iterator[str]:
    """The entries below ``Args:`` that are no parameter of the function, nor a field of the class."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE)
    if section is None:
        return
    names = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
    names |= {ast.unparse(child.target) for child in ast.walk(node) if isinstance(child, ast.AnnAssign)}
    for entry in re.findall(r"^    ([\w, ]+):", section[1], re.MULTILINE):
        yield from (name for name in entry.split(", ") if name not in names)


@functools.cache
def sources(folder: str) -> dict[Path, Source]:
    return {file: read(ast.parse(file.read_text(encoding="utf-8"))) for file in sorted((ROOT / folder).rglob("*.py"))}


@functools.cache
def known(folders: tuple[str, ...]) -> frozenset[str]:
    """What a name may mean in any file of these folders."""
    found = {*dir(builtins), *keyword.kwlist, *OTHERS, *folders}
    for folder in folders:
        for file, source in sources(folder).items():
            found |= {file.stem, *file.relative_to(ROOT).parts[:-1], *source.defined}
    return frozenset(found)


def is_there(dotted: str) -> bool:
    """Whether a module, or a name in one, exists: ``kvforge.hub``, ``kvforge.cli.main``."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if length == len(parts) and path.is_dir():
            return True
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file():
            return length == len(parts) or parts[length] in sources(parts[0])[module].used
    return False


def gone(source: Source, everywhere: frozenset[str]) -> list[str]:
    """The names that a file's docstrings have in backquotes and that mean nothing, and unknown parameters."""
    missing = [*source.unknown_parameters]
    for name in (found for text in source.texts for found in QUOTED.findall(text)):
        if name.partition(".")[0] in FOLDERS and "." in name:
            is_known = name in OTHERS or is_there(name)
        else:
            is_known = "." in name or name in source.used or name in everywhere or bool(TRANSFORMERS.fullmatch(name))
        missing += [] if is_known else [name]
    return missing


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_name_what_is_there(folder: str) -> None:
    everywhere = known(PRODUCT if folder in PRODUCT else FOLDERS)
    found = {str(file.relative_to(ROOT)): gone(source, everywhere) for file, source in sources(folder).items()}
    assert {file: names for file, names in found.items() if names} == {}


def test_names_of_others_are_named_somewhere() -> None:
    quoted = {name for folder in FOLDERS for source in sources(folder).values() for name in quoted_names(source)}
    assert quoted >= OTHERS.keys()


def quoted_names(source: Source) -> list[str]:
    return [name for text in source.texts for name in QUOTED.findall(text)]


def test_a_name_that_is_gone_is_found() -> None:
    source = '''"""See ``kvforge.no_such.module``, ``kvforge.cli.main``, ``kvforge.cli.nobody``."""
def f(maximum):
    """At most ``most`` of ``maximum``; see ``sampling_checks`` and ``check_count``.

    Args:
        maximum: x
        least, most: y
    """
'''
    assert gone(read(ast.parse(source)), known(PRODUCT)) == [
        "least", "most", "kvforge.no_such.module", "kvforge.cli.nobody", "most", "sampling_checks",
    ]  # fmt: skip
