"""What CONTRIBUTING.md says of a target is true of every target."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from kvforge.cli import make_parser
from kvforge.compiler import targets
from kvforge.compiler.recipe import load_recipe
from kvforge.compiler.targets import HOSTED, TARGETS, Hosted, Target
from kvforge.runtime import loading
from kvforge.runtime.sessions import session
from kvforge.runtime.sessions.session import Session
from kvforge.serving.engine.remote import RemoteEngine
from kvforge.vllm_engine.engine import VllmEngine

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Adding a target\n")[1].split("\n## ")[0]
FUNCTIONS = {
    name: [part.strip() for part in arguments.split(",") if part.strip()]
    for name, arguments in re.findall(r"^ *\| `(\w+)\((.*?)\)` \|", SECTION, re.MULTILINE)
}
MODULES = sorted(module.name for module in pkgutil.iter_modules(targets.__path__))
FOUND = [name for name in MODULES if name not in HOSTED]
DEFAULTS = ("allocate_pools", "early_exit", "verify", "rope_tables", "warm_up")


def functions_of(module: object) -> dict[str, list[str]]:
    """The arguments of the described functions that ``module`` has."""
    return {
        name: [part for part in inspect.signature(getattr(module, name)).parameters if part != "self"]
        for name in FUNCTIONS
        if callable(getattr(module, name, None))
    }


def test_the_table_is_the_protocol() -> None:
    protocol = {name for name, value in vars(Target).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert FUNCTIONS.keys() == protocol
    assert functions_of(Target) == FUNCTIONS


def test_every_module_of_the_folder_is_listed_and_has_a_session() -> None:
    assert FOUND == sorted(TARGETS) == sorted(session._MODULES)
    assert sorted((*TARGETS, *HOSTED)) == MODULES


@pytest.mark.parametrize("name", HOSTED)
def test_a_hosted_target_has_what_its_protocol_has_and_an_engine_of_its_own(name: str) -> None:
    protocol = {name for name, value in vars(Hosted).items() if inspect.isfunction(value) and not name.startswith("_")}
    module = importlib.import_module(f"kvforge.compiler.targets.{name}")
    assert protocol == {"isa", "stages", "write_engine"} and all(f"`{part}`" in SECTION for part in protocol)
    for part in protocol:
        described = [each for each in inspect.signature(getattr(Hosted, part)).parameters if each != "self"]
        assert list(inspect.signature(getattr(module, part)).parameters) == described
    assert sorted(HOSTED) == sorted(loading._ENGINES)
    methods = {"add_request", "abort", "step", "has_unfinished", "stats"}
    assert methods <= vars(VllmEngine).keys() & vars(RemoteEngine).keys()


@pytest.mark.parametrize("name", FOUND)
def test_a_target_has_what_is_described(name: str) -> None:
    assert functions_of(importlib.import_module(f"kvforge.compiler.targets.{name}")) == FUNCTIONS


@pytest.mark.parametrize("name", FOUND)
def test_a_session_has_what_is_described(name: str) -> None:
    path = session._MODULES[name]
    assert path.startswith("kvforge.runtime.sessions.")
    # Read, not imported: TensorRT's Python API may be missing.
    source = (ROOT / (path.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    assert re.search(r"^def load_session\(engine_dir: Path, manifest: Manifest\) -> \w+Session:", source, re.MULTILINE)
    assert ("manifest.isa" in source) == (name != "tensorrt")


def test_what_a_session_must_have() -> None:
    assert {"lower", "upper"} == Session.__abstractmethods__
    assert all(hasattr(Session, name) for name in DEFAULTS)
    assert all(f"`{name}`" in SECTION for name in (*Session.__abstractmethods__, *DEFAULTS))


@pytest.mark.parametrize("name", MODULES)
def test_recipes_take_a_target_and_the_command_names_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"target: {name}\n")
    assert load_recipe(recipe).options.target == name
    with pytest.raises(SystemExit):
        make_parser().parse_args(["build", "--help"])
    assert name in capsys.readouterr().out.split("--target", 2)[-1].split("--dtype")[0]


def test_the_files_that_ask_for_a_target_are_named() -> None:
    """Of compiler and runtime; a comparison with a target's name is a question."""
    question = re.compile(r"\btarget\b (?:[!=]=|in) ")
    asking = {
        str(file.relative_to(ROOT))
        for folder in ("kvforge/compiler", "kvforge/runtime")
        for file in (ROOT / folder).rglob("*.py")
        if question.search(file.read_text(encoding="utf-8"))
    }
    assert asking == set(re.findall(r"`(kvforge/(?:compiler|runtime)/[a-z/]+\.py)`", SECTION))
