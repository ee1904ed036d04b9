"""A KV policy is one file or folder: nothing else of the product asks which one an engine has."""

import ast
import subprocess
import sys
from pathlib import Path

from kvforge.kv_policies import policies

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / "kvforge/kv_policies"


def others(folder: Path) -> list[Path]:
    """The product's files that are no policy's own."""
    owned = {OWN / f"{name}.py" for name in policies()} | {OWN / name for name in policies()}
    return [file for file in folder.rglob("*.py") if not owned & {file, *file.parents}]


def questions(source: str) -> list[str]:
    """The classes of policies that `isinstance`, `issubclass` or a comparison of types asks for."""
    names = {policy.__name__ for policy in policies().values()}
    return [
        name.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name) and name.id in names
    ]


def test_nobody_asks_which_policy_it_is() -> None:
    files = others(ROOT / "kvforge")
    assert len(files) > 300
    assert not {file: found for file in files if (found := questions(file.read_text()))}
    assert questions("def f(p):\n    return isinstance(p, (int, ShadowKV))") == ["ShadowKV"]


def test_a_policys_words_are_its_own() -> None:
    spoken = [file for file in others(ROOT / "kvforge") if "shadow" in file.read_text().lower()]
    assert spoken == []
    assert "shadow" in (OWN / "shadowkv/policy.py").read_text()


def test_numbers_need_neither_torch_nor_models() -> None:
    code = (
        "import sys; from kvforge.kv_policies import OwnerCache, parse; policy = parse('shadowkv'); "
        "policy.keeping.state_pools(OwnerCache(8, 128, 32, 16)); policy.max_cached(9000, 9100); "
        "assert not {'torch', 'model_defs'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
