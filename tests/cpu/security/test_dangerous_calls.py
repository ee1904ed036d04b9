"""No call in the sources that turns data into code: pickles, YAML objects, eval, shells, remote code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("kvforge", "model_defs", "plugins", "triton_repo", "build", "perf")
FORBIDDEN = {
    "eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "cPickle.loads",
    "marshal.loads", "marshal.load", "shelve.open", "dill.load", "dill.loads", "joblib.load", "yaml.load",
    "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp", "jinja2.Environment", "jinja2.Template",
}  # fmt: skip
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def found_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            options = {word.arg: word.value for word in node.keywords}
            name = name_of(node.func)
            if name in FORBIDDEN:
                yield name
            if name == "torch.load" and not _is(options.get("weights_only"), True):
                yield "torch.load without weights_only=True"
            for option in ("trust_remote_code", "allow_pickle", "shell"):
                if option in options and not _is(options[option], False):
                    yield option


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "eval('1')", "torch.load(path)", "yaml.load(text)",
        "os.system('a')",
        "torch.load(path, weights_only=False)", "subprocess.run('a', shell=True)", "f(trust_remote_code=True)",
        "np.load(path, allow_pickle=flag)",
    ],
)  # fmt: skip
def test_the_search_finds(text: str) -> None:
    assert list(found_in(ast.parse(text)))


def test_no_dangerous_call() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {what}"
        for path in sources()
        for what in found_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(sources()) > 100
    assert found == set()
