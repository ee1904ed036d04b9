"""A KV policy is one file or folder: nothing else of the product asks which one an engine has."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

from kvforge.kv_policies import KVPolicy, capabilities, parse, policies

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / "kvforge/kv_policies"
PRODUCT = ("kvforge", "model_defs", "plugins", "triton_repo")
KIN = ("eviction", "sealing")
"""Folders of policies that have other names."""
CAPABILITIES = {"keeping", "insertion", "observing", "probing", "sealing", "host_tier"}


def others() -> list[Path]:
    """The product's files that are no policy's own."""
    names = (*policies(), *KIN)
    owned = {OWN / f"{name}.py" for name in names} | {OWN / name for name in names}
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    return [file for file in files if not owned & {file, *file.parents}]


def questions(source: str) -> list[str]:
    """What asks for a policy's class by `isinstance` or `issubclass`, or compares its name, its class or all of it."""
    every = {kind for policy in policies().values() for kind in policy.__mro__ if issubclass(kind, KVPolicy)}
    names = {kind.__name__ for kind in every - {KVPolicy}}
    asks = re.compile(rf"policy\.name$|kv_policy$|^type\(.*policy\)$|^({'|'.join(names)})\(")
    found = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = ast.walk(node.args[1])
            found += [name.id for name in asked if isinstance(name, ast.Name) and name.id in names]
        elif isinstance(node, ast.Compare | ast.Match):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.subject]
            said = [ast.unparse(side) for side in sides]
            if "None" not in said:  # of what may be left out
                found += [side for side in said if asks.search(side)]
    return found


def imported(source: str) -> list[str]:
    """The modules of policies that a file imports."""
    modules = [node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    own = "|".join((*policies(), *KIN))
    return [module for module in modules if re.match(rf"kvforge\.kv_policies\.({own})\b", module)]


def test_nobody_asks_which_policy_it_is() -> None:
    files = others()
    assert len(files) > 400
    assert {file: asked for file in files if (asked := questions(file.read_text()))} == {}
    outside = [file for file in files if OWN not in file.parents]
    assert {file: modules for file in outside if (modules := imported(file.read_text()))} == {}


def test_questions_are_found() -> None:
    assert questions("def f(p):\n    return isinstance(p, (int, ShadowKV))") == ["ShadowKV"]
    assert questions("issubclass(kind, Eviction)") == ["Eviction"]
    compared = (
        "options.policy.name == 'quest'",
        "manifest.kv_policy != Full.name",
        "type(a.policy) is Quest",
        "p != Full()",
    )
    assert [len(questions(source)) for source in compared] == [1] * 4
    assert questions("match policy.name:\n    case 'quest':\n        pass") == ["policy.name"]
    assert questions("args.kv_policy is None or Need.ONE_QUERY in policy.needs") == []
    assert imported("from kvforge.kv_policies.quest.policy import Quest") == ["kvforge.kv_policies.quest.policy"]


def test_a_policy_has_about_fifteen_numbers_and_its_capabilities() -> None:
    members = {name for name in vars(KVPolicy) if not name.startswith("_")}
    assert members > CAPABILITIES and len(members - CAPABILITIES) <= 15, sorted(members)
    for name in CAPABILITIES:
        assert hasattr(capabilities, name.title().replace("_", ""))
    assert all(inspect.getsource(type(parse(name))) for name in (*policies(), "keydiff+adakv")), "a class of no file"


def test_a_policys_words_are_its_own() -> None:
    files = [file for file in others() if ROOT / "kvforge" in file.parents]
    assert [file for file in files if "shadow" in file.read_text().lower()] == []
    assert "shadow" in (OWN / "shadowkv/policy.py").read_text()


def test_numbers_need_neither_torch_nor_models() -> None:
    code = (
        "import sys; from kvforge.kv_policies import OwnerCache, parse; policy = parse('shadowkv'); "
        "policy.keeping.state_pools(OwnerCache(8, 128, 32, 16)); policy.max_cached(9000, 9100); "
        "assert not {'torch', 'model_defs'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
