"""Policies and model families of installed packages, by their entry points; broken ones concern who asks for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.model_defs.test_family_in_one_file import CONFIG

ROOT = Path(__file__).resolve().parents[3]
POLICY = "tests.support.extensions.forgetting_policy"
FAMILY = "tests.support.extensions.novel_family"
BROKEN = {
    "gone": ("no.such.module:Gone", "No module named 'no'"),
    "nothing": ("brought:Nothing", "module 'brought' has no attribute 'Nothing'"),
    "raising": ("brought.raising:Policy", "1 is not 2"),
    "spelled": ("brought.spelled:Policy", "invalid syntax (spelled.py, line 1)"),
    "number": ("brought:NUMBER", "this is no {kind}"),
    "ending": ("brought.ending:Policy", "no licence"),
}
BROKEN_POLICIES = BROKEN | {
    "half": ("brought:Half", "Half does not define device_bytes, device_bytes_read, title"),
    "nameless": ("brought:Nameless", "Nameless.name is None; give lower-case letters, digits and underscores"),
    "shout": ("brought:Shout", "Shout.name is 'Re-Cent'; give lower-case letters, digits and underscores"),
    "bare": ("brought:Bare", "Bare.__init__() missing 1 required positional argument: 'rank'"),
    "refusing": ("brought:Refusing", "not today"),
    "counting": ("brought:Counting", "Counting.counters is 7; give names with texts"),
    "needy": ("brought:Needy", "Needy.needs is ['much']; give a frozenset of Need"),
    "again": ("brought:Again", "there is a KV policy 'full' already"),
}
BROUGHT = f"""
from dataclasses import dataclass
from kvforge.kv_policies import Full, KVPolicy
from kvforge.kv_policies.capabilities import Keeping
from {POLICY} import Forgetting

NUMBER = 7
class Half(KVPolicy):
    name = "half"
class Nameless(Forgetting):
    name = None
class Shout(Forgetting):
    name = "Re-Cent"
class Again(Forgetting):
    name = "full"
class Counting(Keeping, Forgetting):
    name, counters = "counting", 7
class Needy(Forgetting):
    name, needs = "needy", ["much"]
class Refusing(Forgetting):
    name = "refusing"
    def __post_init__(self):
        raise ValueError("not today")
@dataclass(frozen=True)
class Bare(Full):
    rank: int
    name = "bare"
"""


def install(folder: Path, group: str, entry_points: dict[str, str]) -> None:
    """Make ``folder`` look like the site-packages of a package that has these entry points."""
    info = folder / f"{group}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {group}\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[kvforge.{group}]", *lines, ""]))
    (folder / "brought").mkdir(exist_ok=True)
    (folder / "brought" / "__init__.py").write_text(BROUGHT)
    (folder / "brought" / "raising.py").write_text("raise RuntimeError('1 is not 2')\n")
    (folder / "brought" / "ending.py").write_text("raise SystemExit('no licence')\n")
    (folder / "brought" / "spelled.py").write_text("clas Policy:\n")


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("first", ["kvforge.kv_policies", POLICY])
def test_a_policy(first: str, tmp_path: Path) -> None:
    """Into a process that knows nothing of it, or has imported the policy's file before."""
    install(tmp_path, "kv_policies", {"forgetting": f"{POLICY}:Forgetting"})
    code = f"import {first}; from kvforge.kv_policies import parse; assert parse('forgetting:block=16').block == 16"
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["model_defs", FAMILY])
def test_a_family(first: str, tmp_path: Path) -> None:
    install(tmp_path, "model_defs", {"novel": f"{FAMILY}:FAMILY"})
    code = (
        f"import json, {first}; from model_defs import load_config; "
        f"assert load_config(json.loads({json.dumps(CONFIG)!r})).model_type == 'novel'"
    )
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


def test_broken_policies(tmp_path: Path) -> None:
    """The others are there; each of the broken is told where it is asked for, and by the doctor."""
    entries = {name: value for name, (value, _) in BROKEN_POLICIES.items()}
    install(tmp_path, "kv_policies", entries | {"forgetting": f"{POLICY}:Forgetting"})
    code = "import json; from kvforge.kv_policies import *; print(json.dumps([list(policies()), broken_policies()]))"
    done = python(tmp_path, "-c", code)
    assert done.stderr == ""
    names, broken = json.loads(done.stdout)
    assert names[-2:] == ["tova", "forgetting"] and {"full", "shadowkv"} < {*names}
    said = {
        name: f"{value}: {why.format(kind='subclass of KVPolicy')}" for name, (value, why) in BROKEN_POLICIES.items()
    }
    assert broken == said
    asked = python(tmp_path, "-m", "kvforge.cli", "plan", "--model", "llama-3.1-8b", "--kv-policy", "half")
    assert asked.returncode != 0
    assert asked.stderr.strip().splitlines()[-1].endswith(f"the KV policy half cannot be loaded: {said['half']}.")
    # Without importing every optional package, which takes most of its time.
    code = "from kvforge.cli import main; from kvforge.doctor import checks; checks.package_checks = tuple; "
    doctor = python(tmp_path, "-c", code + "main(['doctor'])").stdout
    assert all(why in doctor for why in said.values())


def test_broken_families(tmp_path: Path) -> None:
    entries = {name: value for name, (value, _) in BROKEN.items()}
    install(tmp_path, "model_defs", entries | {"novel": f"{FAMILY}:FAMILY", "other": f"{FAMILY}:OTHER"})
    code = (
        f"import dataclasses, json, {FAMILY} as file; "
        "file.OTHER = dataclasses.replace(file.FAMILY, architecture='Other'); "
        "from model_defs import *; print(json.dumps([list(families()), broken_families()])); "
        "load_config({'model_type': 'gone_swiftkv'})"
    )
    done = python(tmp_path, "-c", code)
    names, broken = json.loads(done.stdout)
    files = (ROOT / "model_defs").glob("*.py")
    assert names == [*sorted(file.stem for file in files if "\nFAMILY = " in file.read_text()), "novel"]
    said = {name: f"{value}: {why.format(kind='Family')}" for name, (value, why) in BROKEN.items()}
    assert broken == said | {"other": f"{FAMILY}:OTHER: there is a model family 'novel' already"}
    assert done.stderr.strip().endswith(f"The model family gone_swiftkv cannot be loaded: {said['gone']}.")
